#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace promptcache::gpu {

// The sums of common/page_sum.h over pages in device memory.
struct PageSumParams {
  const std::byte* const* pages = nullptr;  // [num_pages], 8-byte aligned
  uint64_t* sums = nullptr;                 // [num_pages]
  int32_t num_pages = 0;
  uint64_t page_bytes = 0;  // a multiple of 8
};

// cudaErrorInvalidValue for a page that is no multiple of 8 bytes.
cudaError_t LaunchPageSum(const PageSumParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
