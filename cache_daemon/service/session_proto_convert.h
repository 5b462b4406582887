#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_daemon/core/page_pool.h"
#include "cache_daemon/core/requests.h"
#include "cache_daemon/core/types.h"
#include "cache_daemon/core/worker_device.h"
#include "common/kv_layout.h"
#include "promptcache/node/v1/node.pb.h"

// Between the messages of a worker's session and the core's values. What comes
// from the worker is checked here for being well-formed: InvalidArgument names
// the field and the numbers.
namespace promptcache::daemon {

inline constexpr size_t kMaxKeysPerAcquire = 8192;

absl::StatusOr<KvLayout> FromProto(const node::v1::KvLayout& proto);
RequestUse FromProto(const node::v1::ReportUse& proto);
WorkerDevice DeviceFromProto(const node::v1::Hello& hello);
// What a worker on that device needs to import its segments and the host's.
void DescribeSegments(const PagePool& pool, uint32_t device,
                      node::v1::Welcome* welcome);

// What is not known is kRequest: an older worker does not say it.
AcquirePurpose FromProto(node::v1::AcquirePurpose proto);
// Paths point into `request`.
absl::StatusOr<std::vector<AcquireKey>> KeysFromProto(
    const node::v1::AcquireRequest& request);
// `shape` says how many of the flat page sums are each reservation's.
absl::StatusOr<std::vector<CommitModule>> ModulesFromProto(
    const node::v1::CommitRequest& request, const PageShape& shape);
absl::StatusOr<std::vector<PolicyChange>> ChangesFromProto(
    const node::v1::SetPolicyRequest& request);

node::v1::AcquireReply ToProto(uint64_t request_id,
                               const AcquireResult& result);
node::v1::PendingResolved ToProto(const PendingResolved& resolved);

}  // namespace promptcache::daemon
