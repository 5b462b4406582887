#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "common/mutex.h"
#include "grpcpp/grpcpp.h"

namespace promptcache::worker {

// A server stream whose messages are made faster than they may be read: they
// wait here, and the stream says when there are too many. Finish goes out
// after the last message. Push and End are called by one
// thread at a time.
template <typename Message>
class QueuedWriteReactor : public grpc::ServerWriteReactor<Message> {
 public:
  // Messages that may wait before ready() is false.
  static constexpr size_t kMaxQueued = 32;

  void Push(Message message) ABSL_LOCKS_EXCLUDED(mu_) {
    const Message* next = nullptr;
    {
      MutexLock lock(&mu_);
      if (broken_) return;
      queue_.push_back(std::move(message));
      if (writing_) return;
      writing_ = true;
      next = &queue_.front();
    }
    this->StartWrite(next);
  }
  // REQUIRES: once, and no Push after it.
  void End(grpc::Status status) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      status_ = std::move(status);
      ended_ = true;
      if (writing_) return;
    }
    FinishNow();
  }
  bool ready() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return queue_.size() < kMaxQueued;
  }
  // Half of them were read: there is room for as many at a go.
  bool caught_up() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return queue_.size() <= kMaxQueued / 2;
  }

 protected:
  // The reader has caught up by one message, or has gone. No lock is held.
  virtual void OnDrained() = 0;
  // The status is about to go out. No lock is held.
  virtual void OnFinish() = 0;

 private:
  void FinishNow() {
    OnFinish();
    this->Finish(status_);
  }
  void OnWriteDone(bool ok) final ABSL_LOCKS_EXCLUDED(mu_) {
    const Message* next = nullptr;
    bool finish = false;
    {
      MutexLock lock(&mu_);
      if (ok) {
        queue_.pop_front();
      } else {
        broken_ = true;
        queue_.clear();
      }
      writing_ = !queue_.empty();
      if (writing_) next = &queue_.front();
      finish = !writing_ && ended_;
    }
    if (next != nullptr) this->StartWrite(next);
    if (finish) {
      FinishNow();
    } else {
      OnDrained();
    }
  }

  mutable Mutex mu_;
  // The front is gRPC's to read while writing_; a deque keeps its place.
  std::deque<Message> queue_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_;  // written before ended_, read after it
};

}  // namespace promptcache::worker
