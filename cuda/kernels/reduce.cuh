#pragma once

#include "cuda/kernels/device.cuh"

// Sums over the threads of a warp or block. Every thread gets the result, and
// the order of additions depends on the number of threads alone.
namespace promptcache::gpu {

inline constexpr int kWarpLanes = 32;

// Butterfly: a + b is b + a, so that all lanes end with the same bits.
__device__ __forceinline__ float WarpSum(float value) {
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// `scratch`: one float a warp, in shared memory; free again on return.
// REQUIRES: all threads of a block of whole warps call it.
__device__ __forceinline__ float BlockSum(float value, float* scratch) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  value = WarpSum(value);
  if (threadIdx.x % kWarpLanes == 0) scratch[threadIdx.x / kWarpLanes] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < num_warps; ++warp) sum += scratch[warp];
  __syncthreads();
  return sum;
}

}  // namespace promptcache::gpu
