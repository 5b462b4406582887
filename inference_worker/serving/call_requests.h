#pragma once

#include <memory>

#include "common/mutex.h"
#include "inference_worker/serving/scheduler.h"

namespace promptcache::worker {

// The requests that one call makes of the scheduler, one after the other, and
// that its caller may end at any moment: before the first of them is submitted,
// too. Thread-safe; must not outlive the scheduler.
class CallRequests {
 public:
  explicit CallRequests(Scheduler* scheduler) : scheduler_(scheduler) {}
  CallRequests(const CallRequests&) = delete;
  CallRequests& operator=(const CallRequests&) = delete;

  // As Scheduler::Submit, or Cancelled. Then the sink hears nothing.
  absl::Status Submit(GenerationRequest request,
                      std::shared_ptr<GenerationSink> sink)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the request that runs, if one does, and lets in no other.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return cancelled_;
  }

 private:
  Scheduler* const scheduler_;

  mutable Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<CancelFlag> flag_ ABSL_GUARDED_BY(mu_);  // of the last one
};

}  // namespace promptcache::worker
