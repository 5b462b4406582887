#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "common/mutex.h"

namespace promptcache::daemon {

// Tells waiting threads, each of them, that there is something to do.
// Thread-safe. Several notifications before a wait count as one.
class WorkSignal {
 public:
  void Notify() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    ++num_notified_;
    changed_.SignalAll();
  }
  // Returns at a notification after the one that `seen` knows of (at once when
  // it came already), or after `timeout`; what to pass the next time.
  uint64_t Wait(uint64_t seen, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (num_notified_ == seen) changed_.WaitWithTimeout(&mu_, timeout);
    return num_notified_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  uint64_t num_notified_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace promptcache::daemon
