#pragma once

#include "absl/time/time.h"
#include "common/mutex.h"

namespace promptcache::daemon {

// Tells a waiting thread that there is something to do. Thread-safe. Several
// notifications before a wait count as one.
class WorkSignal {
 public:
  void Notify() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    notified_ = true;
    changed_.SignalAll();
  }
  // Returns at a notification, or after `timeout`.
  void Wait(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (!notified_) changed_.WaitWithTimeout(&mu_, timeout);
    notified_ = false;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace promptcache::daemon
