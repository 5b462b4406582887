#include "cache_daemon/service/event_reactor.h"

#include <optional>
#include <utility>

#include "cache_daemon/service/proto_convert.h"
#include "common/rpc/grpc_status.h"

namespace promptcache::daemon {

EventReactor* EventReactor::Start(EventHub* hub, size_t capacity,
                                  std::atomic<int>* num_watchers, int max) {
  std::shared_ptr<EventReactor> reactor(new EventReactor(num_watchers));
  EventReactor* raw = reactor.get();
  raw->self_ = reactor;
  if (num_watchers->fetch_add(1) >= max) {
    raw->End(absl::ResourceExhaustedError("too many readers of events"));
    return raw;
  }
  // Weakly: the hub may call while the stream ends.
  auto watcher =
      hub->Watch(capacity, [weak = std::weak_ptr<EventReactor>(reactor)] {
        if (const auto self = weak.lock()) self->Pump();
      });
  {
    MutexLock lock(&raw->mu_);
    raw->watcher_ = std::move(watcher);
    // Says that events are collected from now on.
    if (!raw->ended_) raw->StartSendInitialMetadata();
  }
  return raw;
}

void EventReactor::Pump() {
  MutexLock lock(&mu_);
  if (writing_ || ended_ || watcher_ == nullptr) return;
  const std::optional<CacheEvent> event = watcher_->Next();
  if (!event.has_value()) return;
  write_ = ToProto(*event);
  writing_ = true;
  StartWrite(&write_);
}

void EventReactor::OnSendInitialMetadataDone(bool ok) { OnWriteDone(ok); }

void EventReactor::OnWriteDone(bool ok) {
  if (!ok) {
    End(absl::CancelledError("the connection is gone"));
    return;
  }
  {
    MutexLock lock(&mu_);
    writing_ = false;
  }
  Pump();
}

void EventReactor::OnCancel() {
  End(absl::CancelledError("the connection is gone"));
}

void EventReactor::End(const absl::Status& status) {
  const std::shared_ptr<EventReactor> self = shared_from_this();
  std::shared_ptr<EventWatcher> watcher;  // dropped after the lock
  MutexLock lock(&mu_);
  if (ended_) return;
  ended_ = true;
  watcher = std::move(watcher_);
  Finish(rpc::ToGrpcStatus(status));
}

void EventReactor::OnDone() {
  num_watchers_->fetch_sub(1);
  const std::shared_ptr<EventReactor> self = std::move(self_);
}

}  // namespace promptcache::daemon
