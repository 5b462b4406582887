#include "inference_worker/serving/leased_arrival.h"

#include "absl/time/clock.h"

namespace promptcache::worker {
namespace {

// A layer takes tens of microseconds to compute and to copy.
constexpr absl::Duration kPoll = absl::Microseconds(20);

}  // namespace

bool LeasedArrival::WaitForLayers(uint32_t num_layers) {
  while (true) {
    const ModuleProgress progress = lease_->Progress(module_);
    if (progress.ended) return lease_->Valid(module_);
    if (progress.num_layers >= num_layers) return true;
    if (absl::Now() >= deadline_) return false;
    absl::SleepFor(kPoll);
  }
}

bool LeasedArrival::WaitForVerified() { return WaitForLayers(UINT32_MAX); }

}  // namespace promptcache::worker
