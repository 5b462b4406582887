#include "inference_worker/engine/gpu_page_sums.h"

#include "cuda/kernels/page_sum.h"
#include "cuda/runtime/cuda_status.h"

namespace promptcache::worker {

KvMemory::SumPages PageSumKernel() {
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
