#include "inference_worker/engine/gpu_backend.h"

#include "cuda/kernels/page_sum.h"
#include "cuda/runtime/cuda_status.h"
#include "inference_worker/engine/cuda_backend.h"

namespace promptcache::worker {

const char* WhyNoGpuKernels() { return ""; }

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(
    const ModelFile& file, gpu::Device& device, const ComputeOptions& options) {
  return CreateCudaBackend(file, {.device = &device,
                                  .numerics = options.numerics,
                                  .batch_invariant = options.batch_invariant,
                                  .progress = options.progress});
}

KvMemory::SumPages GpuPageSums() {
  return [](const std::byte* const* pages, size_t num_pages, size_t page_bytes,
            uint64_t* sums, gpu::Stream* stream) {
    return gpu::ToStatus(
        gpu::LaunchPageSum({.pages = pages,
                            .sums = sums,
                            .num_pages = static_cast<int32_t>(num_pages),
                            .page_bytes = page_bytes},
                           stream->native()),
        "LaunchPageSum");
  };
}

}  // namespace promptcache::worker
