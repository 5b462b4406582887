// Grid: (parts of a page, pages). A part's threads add their terms, the warps
// add theirs to the page's sum; modulo 2^64 the order does not matter.

#include "cuda/kernels/device.cuh"
#include "cuda/kernels/page_sum.h"
#include "cuda/kernels/reduce.cuh"

namespace promptcache::gpu {
namespace {

constexpr int kThreads = 256;
// Words of a thread in one part.
constexpr uint64_t kWordsPerThread = 16;
constexpr uint64_t kSeed = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ uint64_t WordKey(uint64_t i) {
  uint64_t z = (i + 1) * kSeed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) | 1;
}

__global__ void __launch_bounds__(kThreads) PageSumKernel(PageSumParams p) {
  const uint64_t num_words = p.page_bytes / sizeof(uint64_t);
  const uint64_t begin = blockIdx.x * kThreads * kWordsPerThread;
  uint64_t end = begin + kThreads * kWordsPerThread;
  if (end > num_words) end = num_words;
  for (unsigned page = blockIdx.y; page < static_cast<unsigned>(p.num_pages);
       page += gridDim.y) {
    const auto* words = reinterpret_cast<const uint64_t*>(p.pages[page]);
    unsigned long long sum = 0;
    for (uint64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      sum += (words[i] ^ kSeed) * WordKey(i);
    }
    for (int step = kWarpLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (threadIdx.x % kWarpLanes == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.sums + page), sum);
    }
  }
}

}  // namespace

cudaError_t LaunchPageSum(const PageSumParams& params, cudaStream_t stream) {
  if (params.page_bytes % sizeof(uint64_t) != 0) return cudaErrorInvalidValue;
  if (params.num_pages == 0) return cudaSuccess;
  const size_t sum_bytes =
      static_cast<size_t>(params.num_pages) * sizeof(uint64_t);
  const cudaError_t error = cudaMemsetAsync(params.sums, 0, sum_bytes, stream);
  if (error != cudaSuccess || params.page_bytes == 0) return error;
  constexpr uint64_t kPartBytes = kThreads * kWordsPerThread * sizeof(uint64_t);
  constexpr int kMaxGridRows = 65535;
  const int pages =
      params.num_pages < kMaxGridRows ? params.num_pages : kMaxGridRows;
  const dim3 grid(
      static_cast<unsigned>((params.page_bytes + kPartBytes - 1) / kPartBytes),
      static_cast<unsigned>(pages));
  return Launch(PageSumKernel, grid, dim3(kThreads), 0, stream, params);
}

}  // namespace promptcache::gpu
