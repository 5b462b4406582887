#pragma once

#include <atomic>
#include <memory>

#include "absl/status/status.h"
#include "cache_daemon/core/event_hub.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/v1/cache.pb.h"

namespace promptcache::daemon {

// One reader of events: writes what its watcher holds, one event at a time.
// Thread-safe. Held by gRPC until OnDone; the hub's callback holds it weakly.
class EventReactor final : public grpc::ServerWriteReactor<v1::CacheEvent>,
                           public std::enable_shared_from_this<EventReactor> {
 public:
  // Counts itself in `num_watchers`, which must outlive it; beyond `max` it
  // ends at once with ResourceExhausted.
  static EventReactor* Start(EventHub* hub, size_t capacity,
                             std::atomic<int>* num_watchers, int max);

  void OnSendInitialMetadataDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mu_);
  void OnDone() override;

 private:
  explicit EventReactor(std::atomic<int>* num_watchers)
      : num_watchers_(num_watchers) {}
  void Pump() ABSL_LOCKS_EXCLUDED(mu_);
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  std::atomic<int>* const num_watchers_;
  std::shared_ptr<EventReactor> self_;  // until OnDone
  v1::CacheEvent write_;                // gRPC's while it is being written

  Mutex mu_;
  std::shared_ptr<EventWatcher> watcher_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = true;  // the initial metadata
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace promptcache::daemon
