#include "inference_worker/engine/gpu_backend.h"

#include "inference_worker/engine/cuda_backend.h"
#include "inference_worker/engine/gpu_page_sums.h"

namespace promptcache::worker {

const char* WhyNoGpuKernels() { return ""; }

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(
    const ModelFile& file, gpu::Device& device, const ComputeOptions& options) {
  return CreateCudaBackend(file, {.device = &device,
                                  .numerics = options.numerics,
                                  .batch_invariant = options.batch_invariant,
                                  .progress = options.progress});
}

KvMemory::SumPages GpuPageSums() { return PageSumKernel(); }

}  // namespace promptcache::worker
