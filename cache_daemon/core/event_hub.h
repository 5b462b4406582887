#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cache_daemon/core/types.h"
#include "common/mutex.h"

namespace promptcache::daemon {

// One reader of events. Holds at most `capacity` of them: when it is full the
// oldest goes, and the reader is told how many it missed before the next one.
// Thread-safe. May outlive the hub.
class EventWatcher {
 public:
  // `on_ready` is called, without a lock, each time the queue turns from empty
  // to not empty; it must not block. May be empty.
  EventWatcher(size_t capacity, std::function<void()> on_ready);

  // The next event, a kMissed one with the number of the lost first; nullopt
  // when there is none now.
  std::optional<CacheEvent> Next() ABSL_LOCKS_EXCLUDED(mu_);
  void Push(const CacheEvent& event) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const size_t capacity_;
  const std::function<void()> on_ready_;

  Mutex mu_;
  std::deque<CacheEvent> queue_ ABSL_GUARDED_BY(mu_);
  uint64_t missed_ ABSL_GUARDED_BY(mu_) = 0;
};

// Hands events to every watcher. Thread-safe. Never blocks on a reader.
class EventHub {
 public:
  // Ends when the last reference but the hub's own goes.
  std::shared_ptr<EventWatcher> Watch(size_t capacity,
                                      std::function<void()> on_ready)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Call without holding a lock.
  void Emit(const CacheEvent& event) ABSL_LOCKS_EXCLUDED(mu_);
  // Cheap: whether making an event is worth it. A watcher that has just gone
  // may still count.
  bool has_watchers() const {
    return num_watchers_.load(std::memory_order_relaxed) > 0;
  }

 private:
  Mutex mu_;
  // weak: a reader ends when its stream does, at a time unknown here.
  std::vector<std::weak_ptr<EventWatcher>> watchers_ ABSL_GUARDED_BY(mu_);
  std::atomic<size_t> num_watchers_{0};
};

}  // namespace promptcache::daemon
