#pragma once

#include "cuda/kernels/device.cuh"

// bf16 and fp16 as the bits that plain headers speak of.
namespace promptcache::gpu {

__device__ __forceinline__ float Bf16ToFloat(uint16_t bits) {
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

// To nearest, ties to even.
__device__ __forceinline__ uint16_t FloatToBf16(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ uint16_t FloatToFp16(float value) {
  return __half_as_ushort(__float2half_rn(value));
}

// Two neighbours, the first one in the low half.
__device__ __forceinline__ uint32_t FloatsToBf16x2(float first, float second) {
  return static_cast<uint32_t>(FloatToBf16(first)) |
         static_cast<uint32_t>(FloatToBf16(second)) << 16;
}

}  // namespace promptcache::gpu
