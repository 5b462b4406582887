#include "cache_daemon/service/session_proto_convert.h"

#include <bit>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "cache_daemon/service/proto_convert.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kPartsBytes = kNumIdentityFields * sizeof(uint64_t);

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
          .recomputed_tokens = proto.recomputed_tokens(),
          .attention_needed_tokens = proto.attention_needed_tokens(),
          .attention_read_tokens = proto.attention_read_tokens()};
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

}  // namespace promptcache::daemon
