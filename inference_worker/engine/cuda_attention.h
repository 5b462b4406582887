#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_plan.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/pass_input.h"

namespace promptcache::worker {

// One kind of attention of a pass (a decoder's; an encoder-decoder has three),
// in all its layers: the plan, its copy on the device, and room for partial
// states. In this order for each pass: Plan, the input's Reserve and Upload,
// Reserve, then Launch for every layer.
// Thread-compatible. Must not outlive the device.
class CudaAttention {
 public:
  CudaAttention(gpu::Device& device, const gpu::AttentionPlan::Options& options)
      : device_(device), options_(options) {}

  // Plans `groups` and adds the plan to what the pass uploads.
  void Plan(std::span<const gpu::AttentionGroup> groups, PassInput& input);
  // Room for states; true when they moved. `stream` must be done with them.
  absl::StatusOr<bool> Reserve();
  // `params`: everything but what the plan decides.
  absl::Status Launch(gpu::AttentionParams params, const PassInput& input,
                      gpu::Stream& stream) const;
  // Launches never shrink below it for plans of nearly the same size, so that
  // a recorded graph serves them all.
  const gpu::AttentionGrid& grid() const { return grid_; }

 private:
  gpu::Device& device_;
  const gpu::AttentionPlan::Options options_;
  gpu::AttentionPlan plan_;
  gpu::AttentionGrid grid_;
  size_t offset_ = 0;  // of the plan in the input
  gpu::DeviceBuffer states_;
};

}  // namespace promptcache::worker
