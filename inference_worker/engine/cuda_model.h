#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kernels/attention_plan.h"
#include "cuda/kernels/rope.h"
#include "cuda/kernels/split_qkv.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/cuda_backend.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// What both kinds of models need on a GPU.

// InvalidArgument, with the numbers, for what the kernels do not have.
absl::Status CheckCudaModel(const ModelConfig& config,
                            const CudaBackendOptions& options);

// "exact/cuda-sm90"; with batch_invariant "exact/cuda-sm90-invariant".
std::string CudaNumerics(const CudaBackendOptions& options);

gpu::AttentionPlan::Options PlanOptions(const ModelConfig& config,
                                        const CudaBackendOptions& options,
                                        uint32_t page_tokens);

// What turns and biases keys and queries; empty what the model does not use.
struct CudaPositions {
  std::optional<gpu::RopeView> rope;
  std::optional<gpu::RopeView> local_rope;  // of layers with a window
  float factor = 1;                         // YaRN's, of `rope`
  const float* alibi_slopes = nullptr;
  std::vector<gpu::DeviceBuffer> memory;  // what they point to

  const gpu::RopeView* RopeOf(bool windowed) const {
    if (windowed && local_rope.has_value()) return &*local_rope;
    return rope.has_value() ? &*rope : nullptr;
  }
};
absl::StatusOr<CudaPositions> MakeCudaPositions(const ModelConfig& config,
                                                gpu::Device& device);

// Copies `values` to memory of the device's own; done on return.
absl::StatusOr<gpu::DeviceBuffer> ToDevice(gpu::Device& device,
                                           const float* values, size_t count);

// Where each row of a group stores its keys and values.
void AppendSlots(const RowGroup& group, const KvView& own,
                 std::byte* const* write_pages, uint32_t page_tokens,
                 std::vector<gpu::KvSlot>* slots);

}  // namespace promptcache::worker
