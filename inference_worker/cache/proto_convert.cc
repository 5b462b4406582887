#include "inference_worker/cache/proto_convert.h"

#include <algorithm>
#include <bit>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/rpc/duration.h"
#include "cuda/runtime/shared_segment.h"

namespace promptcache::worker {
namespace {

// 7 x 8 bytes, little endian.
void AppendParts(const IdentityParts& parts, std::string* out) {
  static_assert(std::endian::native == std::endian::little);
  out->append(reinterpret_cast<const char*>(parts.data()), sizeof(parts));
}

node::v1::AcquirePurpose ToProto(AcquirePurpose purpose) {
  switch (purpose) {
    case AcquirePurpose::kRequest:
      return node::v1::ACQUIRE_PURPOSE_REQUEST;
    case AcquirePurpose::kProbe:
      return node::v1::ACQUIRE_PURPOSE_PROBE;
    case AcquirePurpose::kAgain:
      return node::v1::ACQUIRE_PURPOSE_AGAIN;
    case AcquirePurpose::kKeep:
      return node::v1::ACQUIRE_PURPOSE_KEEP;
  }
  return node::v1::ACQUIRE_PURPOSE_UNSPECIFIED;
}

}  // namespace

node::v1::KvLayout ToProto(const KvLayout& layout) {
  node::v1::KvLayout proto;
  proto.set_num_layers(layout.num_layers);
  proto.set_num_kv_heads(layout.num_kv_heads);
  proto.set_head_dim(layout.head_dim);
  proto.set_page_tokens(layout.page_tokens);
  proto.set_type(static_cast<uint32_t>(layout.type));
  proto.set_version(layout.version);
  return proto;
}

std::vector<ImportedMemory::Told> SegmentsFromProto(
    const node::v1::Welcome& welcome) {
  std::vector<ImportedMemory::Told> segments;
  size_t next_handle = 0;
  for (int i = 0; i < welcome.segment_ids_size(); ++i) {
    ImportedMemory::Told& told = segments.emplace_back();
    told.segment = welcome.segment_ids(i);
    if (i < welcome.segment_kinds_size()) {
      told.kind = static_cast<gpu::HandleKind>(welcome.segment_kinds(i));
    }
    if (i < welcome.segment_bytes_size()) {
      told.num_bytes = welcome.segment_bytes(i);
    }
    if (told.kind == gpu::HandleKind::kCudaIpc) {
      told.ipc_handle = welcome.ipc_handles().substr(
          std::min(next_handle, welcome.ipc_handles().size()),
          gpu::kIpcHandleBytes);
      next_handle += gpu::kIpcHandleBytes;
    }
  }
  return segments;
}

node::v1::SessionRequest ToProto(uint64_t request_id,
                                 const CacheClient::AcquireArgs& args,
                                 bool joined_paths) {
  node::v1::SessionRequest request;
  node::v1::AcquireRequest* acquire = request.mutable_acquire();
  acquire->set_request_id(request_id);
  acquire->set_reserve_missing(args.reserve_missing);
  acquire->set_want_page_sums(args.want_page_sums);
  acquire->set_purpose(ToProto(args.purpose));
  acquire->set_no_wait(args.no_wait);
  acquire->set_schema(args.schema);
  acquire->set_isolation_domain(args.isolation_domain);
  const size_t num_keys = args.keys.size();
  acquire->mutable_keys()->reserve(num_keys * sizeof(Digest));
  acquire->mutable_identity_parts()->reserve(num_keys * sizeof(IdentityParts));
  acquire->mutable_num_tokens()->Reserve(static_cast<int>(num_keys));
  for (const AcquireKey& key : args.keys) {
    acquire->mutable_keys()->append(
        reinterpret_cast<const char*>(key.key.bytes.data()),
        key.key.bytes.size());
    acquire->add_num_tokens(key.num_tokens);
    if (joined_paths) {
      acquire->mutable_joined_paths()->append(key.path);
      acquire->add_path_bytes(static_cast<uint32_t>(key.path.size()));
    } else {
      acquire->add_paths(key.path);
    }
    AppendParts(key.parts, acquire->mutable_identity_parts());
  }
  return request;
}

absl::StatusOr<AcquireOutcome> FromProto(node::v1::Outcome outcome) {
  switch (outcome) {
    case node::v1::OUTCOME_HIT:
      return AcquireOutcome::kHit;
    case node::v1::OUTCOME_RESERVED:
      return AcquireOutcome::kReserved;
    case node::v1::OUTCOME_PENDING:
      return AcquireOutcome::kPending;
    case node::v1::OUTCOME_MISS:
      return AcquireOutcome::kMiss;
    default:
      return absl::InternalError(
          absl::StrCat("outcome ", static_cast<int>(outcome)));
  }
}

v1::CachePolicy PolicyToProto(absl::Duration ttl, bool absolute_ttl, bool pin) {
  v1::CachePolicy policy;
  if (ttl >= absl::ZeroDuration()) {
    rpc::SetDuration(ttl, policy.mutable_ttl());
  }
  policy.set_absolute_ttl(absolute_ttl);
  policy.set_pin(pin);
  return policy;
}

node::v1::ModuleMetadata ToProto(const CommitModule& module) {
  node::v1::ModuleMetadata metadata;
  metadata.set_schema(module.schema);
  metadata.set_path(module.path);
  metadata.set_text_sha256(module.text_sha256.ToBytes());
  metadata.set_context_key(module.context_key.ToBytes());
  metadata.set_num_tokens(module.num_tokens);
  metadata.set_compute_us(module.compute_us);
  *metadata.mutable_policy() =
      PolicyToProto(module.ttl, module.absolute_ttl, module.pin);
  return metadata;
}

}  // namespace promptcache::worker
