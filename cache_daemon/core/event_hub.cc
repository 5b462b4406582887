#include "cache_daemon/core/event_hub.h"

#include <utility>

namespace promptcache::daemon {

EventWatcher::EventWatcher(size_t capacity, std::function<void()> on_ready)
    : capacity_(capacity), on_ready_(std::move(on_ready)) {}

std::optional<CacheEvent> EventWatcher::Next() {
  MutexLock lock(&mu_);
  if (missed_ > 0) {
    CacheEvent event;
    event.kind = CacheEvent::Kind::kMissed;
    event.missed_events = std::exchange(missed_, 0);
    if (!queue_.empty()) event.time = queue_.front().time;
    return event;
  }
  if (queue_.empty()) return std::nullopt;
  CacheEvent event = std::move(queue_.front());
  queue_.pop_front();
  return event;
}

void EventWatcher::Push(const CacheEvent& event) {
  bool was_empty;
  {
    MutexLock lock(&mu_);
    was_empty = queue_.empty() && missed_ == 0;
    queue_.push_back(event);
    if (queue_.size() > capacity_) {
      queue_.pop_front();
      ++missed_;
    }
  }
  if (was_empty && on_ready_) on_ready_();
}

std::shared_ptr<EventWatcher> EventHub::Watch(size_t capacity,
                                              std::function<void()> on_ready) {
  auto watcher = std::make_shared<EventWatcher>(capacity, std::move(on_ready));
  MutexLock lock(&mu_);
  watchers_.push_back(watcher);
  num_watchers_.store(watchers_.size(), std::memory_order_relaxed);
  return watcher;
}

void EventHub::Emit(const CacheEvent& event) {
  std::vector<std::shared_ptr<EventWatcher>> watchers;
  {
    MutexLock lock(&mu_);
    std::erase_if(watchers_, [&](const std::weak_ptr<EventWatcher>& weak) {
      std::shared_ptr<EventWatcher> watcher = weak.lock();
      if (watcher == nullptr) return true;
      watchers.push_back(std::move(watcher));
      return false;
    });
    num_watchers_.store(watchers_.size(), std::memory_order_relaxed);
  }
  for (const std::shared_ptr<EventWatcher>& watcher : watchers) {
    watcher->Push(event);
  }
}

}  // namespace promptcache::daemon
