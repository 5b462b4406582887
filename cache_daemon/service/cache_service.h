#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "cache_daemon/core/event_hub.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/registry/registry.h"
#include "cache_daemon/service/task_queue.h"
#include "promptcache/v1/cache.grpc.pb.h"

namespace promptcache::daemon {

// promptcache.v1.CacheService: what operators ask. Thread-safe.
class CacheService final : public v1::CacheService::CallbackService {
 public:
  // All must outlive the service and its calls.
  struct Deps {
    ModuleCache* cache = nullptr;
    Registry* registry = nullptr;
    EventHub* events = nullptr;
    TaskQueue* tasks = nullptr;
    std::string daemon_id;
    absl::Time start_time;
    int max_watchers = 64;
    size_t watcher_capacity = 1024;  // events that wait for a reader
  };
  explicit CacheService(Deps deps) : deps_(std::move(deps)) {}

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetStatsRequest* request,
                                     v1::CacheStats* response) override;
  grpc::ServerUnaryReactor* ListModules(
      grpc::CallbackServerContext* context,
      const v1::ListModulesRequest* request,
      v1::ListModulesResponse* response) override;
  grpc::ServerUnaryReactor* GetModule(grpc::CallbackServerContext* context,
                                      const v1::GetModuleRequest* request,
                                      v1::Module* response) override;
  grpc::ServerUnaryReactor* EvictModules(
      grpc::CallbackServerContext* context,
      const v1::EvictModulesRequest* request,
      v1::EvictModulesResponse* response) override;
  grpc::ServerUnaryReactor* PinModules(
      grpc::CallbackServerContext* context,
      const v1::PinModulesRequest* request,
      v1::PinModulesResponse* response) override;
  grpc::ServerWriteReactor<v1::CacheEvent>* WatchEvents(
      grpc::CallbackServerContext* context,
      const v1::WatchEventsRequest* request) override;

 private:
  absl::Status Stats(v1::CacheStats* response);
  absl::Status List(const v1::ListModulesRequest& request,
                    v1::ListModulesResponse* response);
  absl::Status Pin(const v1::PinModulesRequest& request,
                   v1::PinModulesResponse* response);
  // Of a filter: it names a schema that the registry does not have.
  bool IsUnknown(const std::string& schema) const;

  const Deps deps_;
  std::atomic<int> num_watchers_{0};
};

}  // namespace promptcache::daemon
