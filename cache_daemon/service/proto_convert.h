#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_daemon/core/page_pool.h"
#include "cache_daemon/core/requests.h"
#include "cache_daemon/core/types.h"
#include "cache_daemon/core/worker_device.h"
#include "cache_daemon/registry/records.h"
#include "common/kv_layout.h"
#include "promptcache/node/v1/node.pb.h"
#include "promptcache/v1/cache.pb.h"
#include "promptcache/v1/schema.pb.h"

// Between protos and the core's values. What comes from a client is checked
// here for being well-formed: InvalidArgument names the field and the numbers.
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
// `field`: its name, for errors.
absl::StatusOr<PolicyRecord> FromProto(const v1::CachePolicy& proto,
                                       const std::string& field);
absl::StatusOr<std::map<std::string, PolicyRecord>> FromProto(
    const google::protobuf::Map<std::string, v1::CachePolicy>& proto,
    const std::string& field);
absl::StatusOr<ModuleFilter> FromProto(const v1::ModuleFilter& proto);

CachePolicy ToCore(const PolicyRecord& record);
PolicyRecord ToRecord(const CachePolicy& policy);

node::v1::AcquireReply ToProto(uint64_t request_id,
                               const AcquireResult& result);
node::v1::PendingResolved ToProto(const PendingResolved& resolved);
v1::CachePolicy ToProto(const PolicyRecord& record);
v1::Schema ToProto(const SchemaRecord& record);
// `pool` names the devices.
v1::Module ToProto(const ModuleInfo& info, const PagePool& pool);
v1::CacheStats ToProto(const CacheStats& stats);
v1::CacheEvent ToProto(const CacheEvent& event);

// What the registry keeps of a committed module, and back.
ModuleRecord ToRecord(const CommitModule& module, const CommitResult& result,
                      const IdentityParts& parts, uint64_t num_bytes,
                      absl::Time now);
ModuleInfo ToInfo(const ModuleRecord& record);

}  // namespace promptcache::daemon
