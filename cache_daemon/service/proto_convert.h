#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_daemon/core/page_pool.h"
#include "cache_daemon/core/requests.h"
#include "cache_daemon/core/types.h"
#include "cache_daemon/registry/records.h"
#include "promptcache/v1/cache.pb.h"
#include "promptcache/v1/schema.pb.h"

// Between the protos of services and the core's values, and the registry's.
// What comes from a client is checked here for being well-formed:
// InvalidArgument names the field and the numbers. Messages of a session:
// session_proto_convert.h.
namespace promptcache::daemon {

// `field`: its name, for errors.
absl::StatusOr<PolicyRecord> FromProto(const v1::CachePolicy& proto,
                                       const std::string& field);
absl::StatusOr<std::map<std::string, PolicyRecord>> FromProto(
    const google::protobuf::Map<std::string, v1::CachePolicy>& proto,
    const std::string& field);
absl::StatusOr<ModuleFilter> FromProto(const v1::ModuleFilter& proto);

CachePolicy ToCore(const PolicyRecord& record);
PolicyRecord ToRecord(const CachePolicy& policy);

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
