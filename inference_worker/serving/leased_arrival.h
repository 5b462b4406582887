#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/engine/arrival.h"

namespace promptcache::worker {

// How long a daemon that lives may take to copy a module to the GPU: far more
// than it should. The pass waits, and what else is in it.
inline constexpr absl::Duration kArrivalTimeout = absl::Seconds(2);

// A leased module that the daemon is copying to the GPU. Waits until `deadline`
// at most; the end of the session ends it, too.
class LeasedArrival final : public Arrival {
 public:
  // `lease` must outlive it.
  LeasedArrival(const CacheLease* lease, size_t module, absl::Time deadline)
      : lease_(lease), module_(module), deadline_(deadline) {}

 private:
  bool WaitForLayers(uint32_t num_layers) override;
  bool WaitForVerified() override;

  const CacheLease* const lease_;
  const size_t module_;
  const absl::Time deadline_;
};

}  // namespace promptcache::worker
