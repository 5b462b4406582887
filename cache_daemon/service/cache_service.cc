#include "cache_daemon/service/cache_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_daemon/service/event_reactor.h"
#include "cache_daemon/service/proto_convert.h"
#include "cache_daemon/service/unary_service.h"
#include "common/status_macros.h"

namespace promptcache::daemon {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

}  // namespace

grpc::ServerUnaryReactor* CacheService::GetStats(
    grpc::CallbackServerContext* context, const v1::GetStatsRequest*,
    v1::CacheStats* response) {
  return RunAsTask(deps_.tasks, context,
                   [this, response] { return Stats(response); });
}

grpc::ServerUnaryReactor* CacheService::ListModules(
    grpc::CallbackServerContext* context, const v1::ListModulesRequest* request,
    v1::ListModulesResponse* response) {
  return RunAsTask(deps_.tasks, context, [this, request, response] {
    return List(*request, response);
  });
}

grpc::ServerUnaryReactor* CacheService::GetModule(
    grpc::CallbackServerContext* context, const v1::GetModuleRequest* request,
    v1::Module* response) {
  return RunAsTask(deps_.tasks, context,
                   [this, request, response]() -> absl::Status {
                     PC_ASSIGN_OR_RETURN(const ModuleInfo info,
                                         deps_.cache->Get(request->key()));
                     *response = ToProto(info, deps_.cache->pool());
                     return absl::OkStatus();
                   });
}

grpc::ServerUnaryReactor* CacheService::EvictModules(
    grpc::CallbackServerContext* context,
    const v1::EvictModulesRequest* request,
    v1::EvictModulesResponse* response) {
  return RunAsTask(deps_.tasks, context,
                   [this, request, response]() -> absl::Status {
                     PC_ASSIGN_OR_RETURN(const ModuleFilter filter,
                                         FromProto(request->filter()));
                     PC_ASSIGN_OR_RETURN(const EvictResult result,
                                         deps_.cache->Evict(filter));
                     // As in memory: who evicts does not want it pinned.
                     for (const ModuleKey& key : result.keys) {
                       deps_.registry->modules().SetPin(key, false);
                     }
                     response->set_num_evicted(result.num_evicted);
                     response->set_bytes(result.bytes);
                     response->set_num_deferred(result.num_deferred);
                     if (result.keys.empty()) {
                       response->set_unknown_schema(IsUnknown(filter.schema));
                     }
                     return absl::OkStatus();
                   });
}

grpc::ServerUnaryReactor* CacheService::PinModules(
    grpc::CallbackServerContext* context, const v1::PinModulesRequest* request,
    v1::PinModulesResponse* response) {
  return RunAsTask(deps_.tasks, context, [this, request, response] {
    return Pin(*request, response);
  });
}

grpc::ServerWriteReactor<v1::CacheEvent>* CacheService::WatchEvents(
    grpc::CallbackServerContext*, const v1::WatchEventsRequest*) {
  return EventReactor::Start(deps_.events, deps_.watcher_capacity,
                             &num_watchers_, deps_.max_watchers);
}

absl::Status CacheService::Stats(v1::CacheStats* response) {
  *response = ToProto(deps_.cache->Stats());
  response->set_daemon_id(deps_.daemon_id);
  response->mutable_start_time()->set_seconds(
      absl::ToUnixSeconds(deps_.start_time));
  PC_ASSIGN_OR_RETURN(const uint64_t num_schemas,
                      deps_.registry->CountSchemas());
  response->set_num_schemas(num_schemas);
  return absl::OkStatus();
}

bool CacheService::IsUnknown(const std::string& schema) const {
  return !schema.empty() &&
         absl::IsNotFound(deps_.registry->GetSchema(schema, 0).status());
}

absl::Status CacheService::List(const v1::ListModulesRequest& request,
                                v1::ListModulesResponse* response) {
  ListArgs args{.include_absent = request.include_absent(),
                .page_size = request.page_size() == 0
                                 ? kDefaultPageSize
                                 : std::min(request.page_size(), kMaxPageSize)};
  if (request.has_filter()) {
    PC_ASSIGN_OR_RETURN(args.filter, FromProto(request.filter()));
  }
  if (!request.page_token().empty()) {
    const absl::StatusOr<Digest> after = Digest::FromHex(request.page_token());
    if (!after.ok()) {
      return rpc::InvalidFieldError("page_token", "is not of an earlier page");
    }
    args.after = *after;
  }
  PC_ASSIGN_OR_RETURN(const ListResult result, deps_.cache->List(args));
  for (const ModuleInfo& info : result.modules) {
    *response->add_modules() = ToProto(info, deps_.cache->pool());
  }
  if (result.more && !result.modules.empty()) {
    response->set_next_page_token(result.modules.back().key.ToHex());
  }
  if (result.modules.empty() && request.page_token().empty()) {
    response->set_unknown_schema(IsUnknown(request.filter().schema()));
  }
  return absl::OkStatus();
}

absl::Status CacheService::Pin(const v1::PinModulesRequest& request,
                               v1::PinModulesResponse* response) {
  PC_ASSIGN_OR_RETURN(const ModuleFilter filter, FromProto(request.filter()));
  const bool pin = !request.unpin();
  PC_ASSIGN_OR_RETURN(const PinResult result, deps_.cache->Pin(filter, pin));
  for (const ModuleKey& key : result.keys) {
    deps_.registry->modules().SetPin(key, pin);
  }
  response->set_num_changed(result.num_changed);
  response->set_pinned_bytes(result.pinned_bytes);
  response->set_pin_budget_bytes(result.pin_budget_bytes);
  response->set_num_refused(result.num_refused);
  response->set_num_unchanged(result.num_unchanged);
  if (result.keys.empty() && result.num_unchanged + result.num_refused == 0) {
    response->set_unknown_schema(IsUnknown(filter.schema));
  }
  return absl::OkStatus();
}

}  // namespace promptcache::daemon
