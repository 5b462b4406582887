#include "cache_daemon/service/proto_convert.h"

#include "absl/strings/str_cat.h"
#include "common/rpc/duration.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

// Infinite ones stay unset.
void SetTime(absl::Time value, google::protobuf::Timestamp* proto) {
  const absl::Duration since_epoch = value - absl::UnixEpoch();
  const int64_t seconds = absl::ToUnixSeconds(value);
  proto->set_seconds(seconds);
  proto->set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(since_epoch - absl::Seconds(seconds))));
}

bool IsFinite(absl::Time value) {
  return value != absl::InfinitePast() && value != absl::InfiniteFuture();
}

void SetCounts(const uint64_t (&counts)[kNumModuleStates],
               google::protobuf::RepeatedPtrField<v1::CountByState>* proto) {
  for (size_t state = 1; state < kNumModuleStates; ++state) {
    v1::CountByState* out = proto->Add();
    out->set_state(static_cast<v1::ModuleState>(state));
    out->set_num_modules(counts[state]);
  }
}

void SetCounts(
    const Counted (&counts)[kNumEvictReasons],
    google::protobuf::RepeatedPtrField<v1::CountByEvictReason>* proto) {
  for (size_t reason = 1; reason < kNumEvictReasons; ++reason) {
    v1::CountByEvictReason* out = proto->Add();
    out->set_reason(static_cast<v1::EvictReason>(reason));
    out->set_num_modules(counts[reason].count);
    out->set_bytes(counts[reason].volume);
  }
}

}  // namespace

absl::StatusOr<PolicyRecord> FromProto(const v1::CachePolicy& proto,
                                       const std::string& field) {
  PolicyRecord policy{.absolute_ttl = proto.absolute_ttl(), .pin = proto.pin()};
  if (!proto.has_ttl()) return policy;
  PC_ASSIGN_OR_RETURN(policy.ttl,
                      rpc::TtlFromProto(proto.ttl(), field + ".ttl"));
  return policy;
}

absl::StatusOr<std::map<std::string, PolicyRecord>> FromProto(
    const google::protobuf::Map<std::string, v1::CachePolicy>& proto,
    const std::string& field) {
  std::map<std::string, PolicyRecord> policies;
  for (const auto& [path, policy] : proto) {
    PC_ASSIGN_OR_RETURN(
        policies[path],
        FromProto(policy, absl::StrCat(field, "[\"", path, "\"]")));
  }
  return policies;
}

absl::StatusOr<ModuleFilter> FromProto(const v1::ModuleFilter& proto) {
  constexpr int kMaxKeys = 10000;
  if (proto.keys_size() > kMaxKeys) {
    return absl::InvalidArgumentError(
        absl::StrCat("filter.keys has ", proto.keys_size(),
                     " keys, the limit is ", kMaxKeys));
  }
  return ModuleFilter{.all = proto.all(),
                      .keys = {proto.keys().begin(), proto.keys().end()},
                      .schema = proto.schema(),
                      .path = proto.path()};
}

CachePolicy ToCore(const PolicyRecord& record) {
  return {.ttl = record.ttl,
          .absolute_ttl = record.absolute_ttl,
          .pin = record.pin};
}

PolicyRecord ToRecord(const CachePolicy& policy) {
  return {.ttl = policy.ttl,
          .absolute_ttl = policy.absolute_ttl,
          .pin = policy.pin};
}

v1::CachePolicy ToProto(const PolicyRecord& record) {
  v1::CachePolicy proto;
  if (record.ttl.has_value()) {
    rpc::SetDuration(*record.ttl, proto.mutable_ttl());
  }
  proto.set_absolute_ttl(record.absolute_ttl);
  proto.set_pin(record.pin);
  return proto;
}

v1::Schema ToProto(const SchemaRecord& record) {
  v1::Schema proto;
  proto.set_name(record.name);
  proto.set_revision(record.revision);
  proto.set_text(record.text);
  proto.set_text_sha256(record.text_sha256.ToHex());
  SetTime(record.create_time, proto.mutable_create_time());
  *proto.mutable_policy() = ToProto(record.policy);
  for (const auto& [path, policy] : record.module_policies) {
    (*proto.mutable_module_policies())[path] = ToProto(policy);
  }
  return proto;
}

v1::Module ToProto(const ModuleInfo& info, const PagePool& pool) {
  v1::Module proto;
  proto.set_key(info.key.ToHex());
  proto.set_schema(info.metadata.schema);
  proto.set_path(info.metadata.path);
  proto.set_isolation_domain(info.isolation_domain);
  proto.set_num_tokens(info.metadata.num_tokens);
  proto.set_bytes(info.bytes);
  proto.set_state(static_cast<v1::ModuleState>(info.state));
  proto.set_tier(static_cast<v1::Tier>(info.tier));
  proto.set_pinned(info.pinned);
  proto.set_num_leases(info.num_leases);
  if (IsFinite(info.commit_time)) {
    SetTime(info.commit_time, proto.mutable_commit_time());
  }
  if (IsFinite(info.last_use_time)) {
    SetTime(info.last_use_time, proto.mutable_last_use_time());
  }
  if (IsFinite(info.expire_time)) {
    SetTime(info.expire_time, proto.mutable_expire_time());
  }
  proto.set_hits(info.hits);
  proto.set_compute_us(info.metadata.compute_us);
  proto.set_context_key(info.metadata.context_key.ToHex());
  proto.set_text_sha256(info.metadata.text_sha256.ToHex());
  proto.set_absence(static_cast<v1::MissReason>(info.absence));
  for (const Placement& placement : info.placements) {
    v1::Placement* out = proto.add_placements();
    out->set_tier(static_cast<v1::Tier>(placement.tier));
    if (placement.tier == Tier::kDevice && pool.on_gpu()) {
      out->set_device_uuid(pool.device_info(placement.device).uuid);
    }
    out->set_state(static_cast<v1::ModuleState>(placement.state));
    out->set_num_leases(placement.num_leases);
  }
  return proto;
}

v1::CacheStats ToProto(const CacheStats& stats) {
  v1::CacheStats proto;
  for (const TierStats& tier : stats.tiers) {
    v1::TierStats* out = proto.add_tiers();
    out->set_tier(static_cast<v1::Tier>(tier.tier));
    out->set_kind(tier.kind);
    out->set_capacity_bytes(tier.capacity_bytes);
    out->set_used_bytes(tier.used_bytes);
    out->set_leased_bytes(tier.leased_bytes);
    out->set_pinned_bytes(tier.pinned_bytes);
    out->set_reserved_bytes(tier.reserved_bytes);
    out->set_quarantined_bytes(tier.quarantined_bytes);
    out->set_largest_free_run_bytes(tier.largest_free_run_bytes);
    out->set_num_modules(tier.num_modules);
    out->set_num_segments(tier.num_segments);
    out->set_hit_lookups(tier.hits.count);
    out->set_hit_tokens(tier.hits.volume);
    out->set_device_uuid(tier.device_uuid);
    out->set_device_name(tier.device_name);
    for (const std::string& kind : tier.handle_kinds) {
      out->add_handle_kinds(kind);
    }
    out->set_mapped_read_only(tier.mapped_read_only);
    SetCounts(tier.modules, out->mutable_modules());
    SetCounts(tier.evictions, out->mutable_evictions());
  }
  SetCounts(stats.modules, proto.mutable_modules());
  SetCounts(stats.evictions, proto.mutable_evictions());
  for (size_t reason = 1; reason < kNumMissReasons; ++reason) {
    v1::CountByMissReason* out = proto.add_misses();
    out->set_reason(static_cast<v1::MissReason>(reason));
    out->set_lookups(stats.misses[reason].count);
    out->set_tokens(stats.misses[reason].volume);
    if (static_cast<MissReason>(reason) != MissReason::kIdentityDiffers) {
      continue;
    }
    for (size_t field = 1; field <= kNumIdentityFields; ++field) {
      v1::CountByField* by_field = out->add_fields();
      by_field->set_field(
          std::string(IdentityFieldName(static_cast<IdentityField>(field))));
      by_field->set_lookups(stats.differing[field].count);
      by_field->set_tokens(stats.differing[field].volume);
    }
  }
  proto.set_hit_lookups(stats.hit_lookups);
  proto.set_miss_lookups(stats.miss_lookups);
  proto.set_hit_tokens(stats.hit_tokens);
  proto.set_miss_tokens(stats.miss_tokens);
  proto.set_missed_probe_lookups(stats.missed_probes.count);
  proto.set_missed_probe_tokens(stats.missed_probes.volume);
  proto.set_commits(stats.commits);
  proto.set_aborted_reservations(stats.aborted_reservations);
  proto.set_promotions(stats.promotions);
  proto.set_promotions_on_hit(stats.promotions_on_hit);
  proto.set_demotions(stats.demotions);
  proto.set_checksum_mismatches(stats.checksum_mismatches);
  proto.set_num_sessions(stats.num_sessions);
  proto.set_num_leases(stats.num_leases);
  proto.set_num_reservations(stats.num_reservations);
  proto.set_request_cached_tokens(stats.request_cached_tokens);
  proto.set_request_created_tokens(stats.request_created_tokens);
  proto.set_request_fresh_tokens(stats.request_fresh_tokens);
  proto.set_request_preemptions(stats.request_preemptions);
  proto.set_request_recomputed_tokens(stats.request_recomputed_tokens);
  proto.set_attention_needed_tokens(stats.attention_needed_tokens);
  proto.set_attention_read_tokens(stats.attention_read_tokens);
  proto.set_pins_refused(stats.pins_refused);
  return proto;
}

v1::CacheEvent ToProto(const CacheEvent& event) {
  v1::CacheEvent proto;
  proto.set_kind(static_cast<v1::CacheEvent::Kind>(event.kind));
  if (IsFinite(event.time)) SetTime(event.time, proto.mutable_time());
  if (event.key.has_value()) proto.set_key(event.key->ToHex());
  proto.set_schema(event.schema);
  proto.set_path(event.path);
  proto.set_tier(static_cast<v1::Tier>(event.tier));
  proto.set_device_uuid(event.device_uuid);
  proto.set_evict_reason(static_cast<v1::EvictReason>(event.evict_reason));
  proto.set_bytes(event.bytes);
  proto.set_session_id(static_cast<uint64_t>(event.session));
  proto.set_detail(event.detail);
  proto.set_missed_events(event.missed_events);
  return proto;
}

ModuleRecord ToRecord(const CommitModule& module, const CommitResult& result,
                      const IdentityParts& parts, uint64_t num_bytes,
                      absl::Time now) {
  ModuleRecord record{.key = result.key,
                      .schema = module.metadata.schema,
                      .path = module.metadata.path,
                      .isolation_domain = result.isolation_domain,
                      .num_tokens = module.metadata.num_tokens,
                      .num_bytes = num_bytes,
                      .text_sha256 = module.metadata.text_sha256,
                      .context_key = module.metadata.context_key,
                      .parts = parts,
                      .compute_us = module.metadata.compute_us,
                      .commit_time = now,
                      .policy = ToRecord(module.metadata.policy)};
  record.policy.pin = result.pinned;
  return record;
}

ModuleInfo ToInfo(const ModuleRecord& record) {
  ModuleInfo info;
  info.key = record.key;
  info.metadata = {.schema = record.schema,
                   .path = record.path,
                   .text_sha256 = record.text_sha256,
                   .context_key = record.context_key,
                   .num_tokens = record.num_tokens,
                   .policy = ToCore(record.policy),
                   .compute_us = record.compute_us};
  info.isolation_domain = record.isolation_domain;
  info.bytes = record.num_bytes;
  info.commit_time = record.commit_time;
  info.absence = MissReason::kNotResident;
  return info;
}

}  // namespace promptcache::daemon
