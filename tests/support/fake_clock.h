#pragma once

#include "common/clock.h"
#include "common/mutex.h"

namespace promptcache {

// A clock that moves only when told to. Thread-safe.
class FakeClock final : public Clock {
 public:
  absl::Time Now() const override ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return now_;
  }
  void Advance(absl::Duration by) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    now_ += by;
  }

 private:
  mutable Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_) = absl::FromUnixSeconds(1'000'000);
};

}  // namespace promptcache
