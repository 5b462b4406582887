#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace promptcache::worker {

// How many calls of a worker's services may be unanswered at once, all kinds
// together: what bounds the executors' queues. And how many are open, which a
// worker that ends waits for: gRPC says that a call is over some time after its
// caller has the answer, and asks again. Thread-safe.
class CallLimit {
 public:
  explicit CallLimit(uint32_t max_calls) : max_calls_(max_calls) {}
  CallLimit(const CallLimit&) = delete;
  CallLimit& operator=(const CallLimit&) = delete;

  // ResourceExhausted when there are too many, Unavailable once closed.
  // Answered and Leave are due in either case.
  absl::Status Enter(absl::Time now = absl::Now()) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    ++open_;
    if (++unanswered_ == 1) busy_since_ = now;
    if (closed_) return absl::UnavailableError("the worker is shutting down");
    if (unanswered_ <= max_calls_) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", max_calls_, " calls are open"));
  }
  // Just before the call's answer goes out.
  void Answered() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    --unanswered_;
  }
  // The call is over.
  void Leave() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (--open_ == 0) none_.SignalAll();
  }

  // A call that was let in, or one of a Warm's requests, is through.
  void RequestDone(absl::Time now) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    done_.push_back(now);
    if (done_.size() > kPaceRequests) done_.pop_front();
  }
  // When to come again for who is refused now: when all that are here will be
  // through, at the pace of late.
  absl::Duration RetryAfter(absl::Time now) const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    absl::Time since = std::max(busy_since_, now - kPaceWindow);
    if (done_.size() == kPaceRequests) since = std::max(since, done_.front());
    const auto count = done_.end() - std::ranges::lower_bound(done_, since);
    return std::clamp((now - since) * unanswered_ / std::max<int64_t>(count, 1),
                      kMinRetry, kMaxRetry);
  }

  // From now on no call is let in; those that are stay. For good.
  void Close() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    closed_ = true;
  }
  // True when every call is over, false when some are not at `deadline`.
  bool AwaitNone(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (open_ > 0) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return false;
      none_.WaitWithTimeout(&mu_, std::min(left, absl::Seconds(1)));
    }
    return true;
  }

 private:
  static constexpr absl::Duration kPaceWindow = absl::Seconds(30);
  static constexpr size_t kPaceRequests = 256;
  static constexpr absl::Duration kMinRetry = absl::Milliseconds(100);
  static constexpr absl::Duration kMaxRetry = absl::Seconds(30);

  const uint32_t max_calls_;

  mutable Mutex mu_;
  CondVar none_;
  uint32_t open_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t unanswered_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time busy_since_ ABSL_GUARDED_BY(mu_);        // meaningless with none
  std::deque<absl::Time> done_ ABSL_GUARDED_BY(mu_);  // of late, the last last
};

}  // namespace promptcache::worker
