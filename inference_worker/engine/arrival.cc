#include "inference_worker/engine/arrival.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace promptcache::worker {

bool Arrival::AwaitLayers(uint32_t num_layers) {
  if (failed_) return false;
  if (num_layers <= num_layers_) return true;
  const absl::Time begin = absl::Now();
  failed_ = !WaitForLayers(num_layers);
  waited_ += absl::Now() - begin;
  if (!failed_) num_layers_ = num_layers;
  return !failed_;
}

bool Arrival::AwaitVerified() {
  if (failed_ || verified_) return verified_;
  const absl::Time begin = absl::Now();
  verified_ = WaitForVerified();
  waited_ += absl::Now() - begin;
  failed_ = !verified_;
  return verified_;
}

void PassArrivals::Add(std::span<Arrival* const> arrivals) {
  for (Arrival* arrival : arrivals) {
    if (std::ranges::find(arrivals_, arrival) == arrivals_.end()) {
      arrivals_.push_back(arrival);
    }
  }
}

void PassArrivals::AwaitLayers(uint32_t num_layers) const {
  for (Arrival* arrival : arrivals_) arrival->AwaitLayers(num_layers);
}

}  // namespace promptcache::worker
