#include "cache_daemon/service/proto_convert.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/duration.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kPartsBytes = kNumIdentityFields * sizeof(uint64_t);

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

absl::Status WrongSize(const char* field, size_t is, size_t due) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", is, " entries, ", due, " are due"));
}

IdentityParts ReadParts(const char* bytes) {
  static_assert(std::endian::native == std::endian::little);
  IdentityParts parts;
  std::memcpy(parts.data(), bytes, sizeof(parts));
  return parts;
}

void AppendModule(const AcquiredModule& module, node::v1::AcquireReply* reply) {
  reply->add_outcomes(static_cast<node::v1::Outcome>(module.outcome));
  reply->add_miss_reasons(static_cast<v1::MissReason>(module.miss_reason));
  reply->add_differing_fields(static_cast<uint32_t>(module.differing_field));
  reply->add_num_runs(static_cast<uint32_t>(module.runs.size()));
  for (const PageRun& run : module.runs) {
    reply->add_run_segments(run.segment);
    reply->add_run_first_pages(run.first_page);
    reply->add_run_num_pages(run.num_pages);
  }
  reply->add_generations(module.generation);
  reply->mutable_page_sums()->Add(module.page_sums.begin(),
                                  module.page_sums.end());
  reply->add_reservation_ids(static_cast<uint64_t>(module.reservation));
  reply->add_tiers(static_cast<v1::Tier>(module.tier));
}

// For `n` modules of one run each.
void Reserve(int n, node::v1::AcquireReply* reply) {
  reply->mutable_outcomes()->Reserve(n);
  reply->mutable_miss_reasons()->Reserve(n);
  reply->mutable_differing_fields()->Reserve(n);
  reply->mutable_num_runs()->Reserve(n);
  reply->mutable_run_segments()->Reserve(n);
  reply->mutable_run_first_pages()->Reserve(n);
  reply->mutable_run_num_pages()->Reserve(n);
  reply->mutable_generations()->Reserve(n);
  reply->mutable_reservation_ids()->Reserve(n);
  reply->mutable_tiers()->Reserve(n);
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

absl::StatusOr<KvLayout> FromProto(const node::v1::KvLayout& proto) {
  const KvLayout layout{.num_layers = proto.num_layers(),
                        .num_kv_heads = proto.num_kv_heads(),
                        .head_dim = proto.head_dim(),
                        .page_tokens = proto.page_tokens(),
                        .type = static_cast<KvType>(proto.type()),
                        .version = proto.version()};
  PC_RETURN_IF_ERROR(layout.Validate());
  return layout;
}

RequestUse FromProto(const node::v1::ReportUse& proto) {
  return {.cached_tokens = proto.cached_tokens(),
          .created_tokens = proto.created_tokens(),
          .fresh_tokens = proto.fresh_tokens(),
          .preemptions = proto.preemptions(),
          .recomputed_tokens = proto.recomputed_tokens()};
}

WorkerDevice DeviceFromProto(const node::v1::Hello& hello) {
  WorkerDevice device{.uuid = hello.device_uuid(),
                      .driver_version = hello.driver_version()};
  if (device.uuid.empty()) device.uuid = "CPU";
  for (const int kind : hello.importable_kinds()) {
    device.importable.push_back(static_cast<gpu::HandleKind>(kind));
  }
  if (device.importable.empty()) {
    device.importable.push_back(gpu::HandleKind::kMemfd);
  }
  return device;
}

void DescribeSegments(const PagePool& pool, uint32_t device,
                      node::v1::Welcome* welcome) {
  welcome->set_generations_stride(pool.generations_stride());
  welcome->set_progress_words_begin(pool.progress_words_begin());
  welcome->set_num_progress_words(PagePool::kNumProgressWords);
  for (uint32_t id = 0; id < pool.num_segments(); ++id) {
    if (pool.tier(id) == Tier::kDevice && pool.device(id) != device) continue;
    const gpu::SharedSegment& segment = pool.segment(id);
    welcome->add_segment_ids(id);
    welcome->add_segment_tiers(static_cast<v1::Tier>(pool.tier(id)));
    welcome->add_segment_kinds(
        static_cast<node::v1::HandleKind>(segment.kind()));
    welcome->add_segment_bytes(segment.num_bytes());
    welcome->mutable_ipc_handles()->append(segment.ipc_handle());
  }
  welcome->set_device_uuid(pool.device_info(device).uuid);
  welcome->set_device_mapped_read_only(
      pool.mapped_read_only(Tier::kDevice, device));
}

absl::Status SetJoinedPaths(const node::v1::AcquireRequest& request,
                            std::vector<AcquireKey>* keys) {
  const std::string_view joined = request.joined_paths();
  size_t begin = 0;
  for (size_t i = 0; i < keys->size(); ++i) {
    const size_t num_bytes = request.path_bytes(static_cast<int>(i));
    // Whole it is UTF-8, as a string of a message; so are pieces that begin
    // where a character does.
    const bool in_character = begin < joined.size() &&
                              (static_cast<uint8_t>(joined[begin]) >> 6) == 2;
    if (num_bytes > joined.size() - begin || in_character) {
      return absl::InvalidArgumentError(
          absl::StrCat("joined_paths has ", joined.size(), " bytes, path ", i,
                       " is ", num_bytes, " from ", begin, " on"));
    }
    (*keys)[i].path = joined.substr(begin, num_bytes);
    begin += num_bytes;
  }
  if (begin == joined.size()) return absl::OkStatus();
  return WrongSize("joined_paths", joined.size(), begin);
}

absl::StatusOr<std::vector<AcquireKey>> KeysFromProto(
    const node::v1::AcquireRequest& request) {
  const size_t n = static_cast<size_t>(request.num_tokens_size());
  if (request.keys().size() != n * kKeyBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys has ", request.keys().size(), " bytes, ", n,
                     " keys have ", n * kKeyBytes));
  }
  if (n > kMaxKeysPerAcquire) {
    return absl::InvalidArgumentError(absl::StrCat(
        n, " keys in one request, the limit is ", kMaxKeysPerAcquire));
  }
  const size_t num_paths = static_cast<size_t>(request.paths_size());
  if (num_paths != 0 && num_paths != n) {
    return WrongSize("paths", num_paths, n);
  }
  const size_t num_joined = static_cast<size_t>(request.path_bytes_size());
  if (num_joined != 0 && num_joined != n) {
    return WrongSize("path_bytes", num_joined, n);
  }
  const std::string& parts = request.identity_parts();
  if (!parts.empty() && parts.size() != n * kPartsBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("identity_parts has ", parts.size(), " bytes, ", n,
                     " keys have ", n * kPartsBytes));
  }
  std::vector<AcquireKey> keys(n);
  for (size_t i = 0; i < n; ++i) {
    PC_ASSIGN_OR_RETURN(
        keys[i].key,
        Digest::FromBytes(
            std::string_view(request.keys()).substr(i * kKeyBytes, kKeyBytes)));
    keys[i].num_tokens = request.num_tokens(static_cast<int>(i));
    if (num_paths != 0) keys[i].path = request.paths(static_cast<int>(i));
    if (!parts.empty()) {
      keys[i].parts = ReadParts(parts.data() + i * kPartsBytes);
    }
  }
  if (num_joined != 0) PC_RETURN_IF_ERROR(SetJoinedPaths(request, &keys));
  return keys;
}

AcquirePurpose FromProto(node::v1::AcquirePurpose proto) {
  switch (proto) {
    case node::v1::ACQUIRE_PURPOSE_PROBE:
      return AcquirePurpose::kProbe;
    case node::v1::ACQUIRE_PURPOSE_AGAIN:
      return AcquirePurpose::kAgain;
    case node::v1::ACQUIRE_PURPOSE_KEEP:
      return AcquirePurpose::kKeep;
    default:
      return AcquirePurpose::kRequest;
  }
}

absl::StatusOr<std::vector<CommitModule>> ModulesFromProto(
    const node::v1::CommitRequest& request, const PageShape& shape) {
  const int n = request.reservation_ids_size();
  if (request.modules_size() != n) {
    return WrongSize("modules", static_cast<size_t>(request.modules_size()),
                     static_cast<size_t>(n));
  }
  std::vector<CommitModule> modules(static_cast<size_t>(n));
  uint64_t next_sum = 0;
  const auto num_sums = static_cast<uint64_t>(request.page_sums_size());
  for (int i = 0; i < n; ++i) {
    const node::v1::ModuleMetadata& proto = request.modules(i);
    CommitModule& module = modules[static_cast<size_t>(i)];
    module.reservation = ReservationId{request.reservation_ids(i)};
    module.metadata.schema = proto.schema();
    module.metadata.path = proto.path();
    if (!proto.text_sha256().empty()) {
      PC_ASSIGN_OR_RETURN(module.metadata.text_sha256,
                          Digest::FromBytes(proto.text_sha256()));
    }
    if (!proto.context_key().empty()) {
      PC_ASSIGN_OR_RETURN(module.metadata.context_key,
                          Digest::FromBytes(proto.context_key()));
    }
    module.metadata.num_tokens = proto.num_tokens();
    module.metadata.compute_us = proto.compute_us();
    PC_ASSIGN_OR_RETURN(
        const PolicyRecord policy,
        FromProto(proto.policy(), absl::StrCat("modules[", i, "].policy")));
    module.metadata.policy = ToCore(policy);
    const uint64_t num_pages = shape.PagesFor(proto.num_tokens());
    if (num_pages > num_sums - next_sum) break;  // told below
    const auto first =
        request.page_sums().begin() + static_cast<int64_t>(next_sum);
    module.page_sums.assign(first, first + static_cast<int64_t>(num_pages));
    next_sum += num_pages;
  }
  uint64_t due = 0;
  for (const auto& module : request.modules()) {
    due += shape.PagesFor(module.num_tokens());
  }
  if (due != num_sums) return WrongSize("page_sums", num_sums, due);
  return modules;
}

absl::StatusOr<std::vector<PolicyChange>> ChangesFromProto(
    const node::v1::SetPolicyRequest& request) {
  if (request.changes_size() > static_cast<int>(kMaxKeysPerAcquire)) {
    return absl::InvalidArgumentError(absl::StrCat(
        request.changes_size(), " changes in one request, the limit is ",
        kMaxKeysPerAcquire));
  }
  std::vector<PolicyChange> changes;
  for (const node::v1::PolicyChange& proto : request.changes()) {
    PolicyChange& change = changes.emplace_back();
    PC_ASSIGN_OR_RETURN(change.key, Digest::FromBytes(proto.key()));
    PC_ASSIGN_OR_RETURN(
        const PolicyRecord policy,
        FromProto(proto.policy(),
                  absl::StrCat("changes[", changes.size() - 1, "].policy")));
    change.policy = ToCore(policy);
    change.only_longer = proto.only_longer();
  }
  return changes;
}

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

node::v1::AcquireReply ToProto(uint64_t request_id,
                               const AcquireResult& result) {
  node::v1::AcquireReply reply;
  reply.set_request_id(request_id);
  reply.set_lease_id(static_cast<uint64_t>(result.lease));
  Reserve(static_cast<int>(result.modules.size()), &reply);
  bool arriving = false;
  for (const AcquiredModule& module : result.modules) {
    AppendModule(module, &reply);
    arriving = arriving || module.progress_word != 0;
  }
  if (!arriving) return reply;
  for (const AcquiredModule& module : result.modules) {
    reply.add_progress_words(module.progress_word);
  }
  return reply;
}

node::v1::PendingResolved ToProto(const PendingResolved& resolved) {
  node::v1::PendingResolved proto;
  proto.set_request_id(resolved.request_id);
  proto.set_index(resolved.index);
  node::v1::AcquireReply* reply = proto.mutable_reply();
  reply->set_request_id(resolved.request_id);
  reply->set_lease_id(static_cast<uint64_t>(resolved.lease));
  AppendModule(resolved.module, reply);
  reply->add_progress_words(resolved.module.progress_word);
  return proto;
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
