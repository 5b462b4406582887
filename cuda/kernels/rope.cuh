#pragma once

#include "cuda/kernels/device.cuh"
#include "cuda/kernels/rope.h"

namespace promptcache::gpu {

// Element `i` of a head, turned to `position`, in fp32. head[j] is element j.
__device__ __forceinline__ float Rotated(const RopeView& rope,
                                         const float* head, int i,
                                         int position) {
  if (rope.table == nullptr || i >= 2 * rope.num_pairs) return head[i];
  int pair;
  bool second;
  int partner;
  if (rope.interleaved) {
    pair = i / 2;
    second = i % 2 != 0;
    partner = i ^ 1;
  } else {
    second = i >= rope.num_pairs;
    pair = second ? i - rope.num_pairs : i;
    partner = second ? pair : i + rope.num_pairs;
  }
  const int64_t row = position < 0 ? -position : position;
  const float* entry = rope.table + row * 2 * rope.num_pairs + pair;
  const float cosine = entry[0];
  const float sine =
      position < 0 ? -entry[rope.num_pairs] : entry[rope.num_pairs];
  return second ? head[i] * cosine + head[partner] * sine
                : head[i] * cosine - head[partner] * sine;
}

}  // namespace promptcache::gpu
