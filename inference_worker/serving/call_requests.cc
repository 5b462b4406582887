#include "inference_worker/serving/call_requests.h"

#include <utility>

#include "common/status_macros.h"

namespace promptcache::worker {

absl::Status CallRequests::Submit(GenerationRequest request,
                                  std::shared_ptr<GenerationSink> sink) {
  // Held over Submit, so that Cancel finds the flag or stops this.
  MutexLock lock(&mu_);
  if (cancelled_) return absl::CancelledError("cancelled by the caller");
  PC_ASSIGN_OR_RETURN(flag_,
                      scheduler_->Submit(std::move(request), std::move(sink)));
  return absl::OkStatus();
}

void CallRequests::Cancel() {
  std::shared_ptr<CancelFlag> flag;
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
    flag = flag_;
  }
  if (flag == nullptr) return;
  flag->Cancel();
  scheduler_->Wake();
}

}  // namespace promptcache::worker
