#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/kv_layout.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/cache/imported_memory.h"
#include "promptcache/node/v1/node.pb.h"

// Between a session's protos and the client's values. What the daemon says is
// taken as it is: whoever uses it checks it against what this process knows.
namespace promptcache::worker {

node::v1::KvLayout ToProto(const KvLayout& layout);
// The memory that a welcome tells of. An older daemon says nothing of kinds:
// then all came by descriptor.
std::vector<ImportedMemory::Told> SegmentsFromProto(
    const node::v1::Welcome& welcome);

// An Acquire. `joined_paths`: the daemon takes all paths in one string.
node::v1::SessionRequest ToProto(uint64_t request_id,
                                 const CacheClient::AcquireArgs& args,
                                 bool joined_paths);
// Internal for one that is not known.
absl::StatusOr<AcquireOutcome> FromProto(node::v1::Outcome outcome);

// `ttl` negative: unset.
v1::CachePolicy PolicyToProto(absl::Duration ttl, bool absolute_ttl, bool pin);
// Without its reservation and page sums, which are arrays of the request.
node::v1::ModuleMetadata ToProto(const CommitModule& module);

}  // namespace promptcache::worker
