#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/time/time.h"

namespace promptcache::worker {

// States that are being copied to the GPU while passes read them, layer by
// layer. Thread-compatible: of the thread that runs passes.
class Arrival {
 public:
  virtual ~Arrival() = default;

  // Blocks until layers [0, num_layers) can be read by what is queued on the
  // device from then on. False: they never will be, and what was computed from
  // them must be thrown away. Waits no more after it was false.
  bool AwaitLayers(uint32_t num_layers);
  // Blocks until all of it is there and was found right. Nothing that was
  // computed from it counts before this was true.
  bool AwaitVerified();
  // What the two have taken.
  absl::Duration waited() const { return waited_; }

 private:
  // The same, where the answer is not known yet.
  virtual bool WaitForLayers(uint32_t num_layers) = 0;
  virtual bool WaitForVerified() = 0;

  uint32_t num_layers_ = 0;  // known to be there
  bool verified_ = false;
  bool failed_ = false;
  absl::Duration waited_;
};

// Everything that a pass reads and that is still arriving, each once.
class PassArrivals {
 public:
  void Clear() { arrivals_.clear(); }
  void Add(std::span<Arrival* const> arrivals);
  bool empty() const { return arrivals_.empty(); }
  // What will never come is read as it is: whoever asked for the pass finds out
  // by AwaitVerified.
  void AwaitLayers(uint32_t num_layers) const;

 private:
  std::vector<Arrival*> arrivals_;
};

}  // namespace promptcache::worker
