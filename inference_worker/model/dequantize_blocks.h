#pragma once

#include <cstddef>

#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Dequantises one block to as many floats as the type's blocks have elements.
using DequantizeBlock = void (*)(const std::byte* block, float* out);

// Null for the types that are not quantised.
DequantizeBlock DequantizeBlockOf(TensorType type);

// Of Q4_K and Q5_K: the scale and minimum, 6 bits each, of one of the 8 runs of
// 32, in the block's 12 bytes.
struct RunScale {
  RunScale(const std::byte* packed, size_t run) {
    if (run < 4) {
      scale = std::to_integer<int>(packed[run]) & 63;
      minimum = std::to_integer<int>(packed[run + 4]) & 63;
    } else {
      scale = (std::to_integer<int>(packed[run + 4]) & 0xF) |
              std::to_integer<int>(packed[run - 4]) >> 6 << 4;
      minimum = std::to_integer<int>(packed[run + 4]) >> 4 |
                std::to_integer<int>(packed[run]) >> 6 << 4;
    }
  }
  int scale;
  int minimum;
};

}  // namespace promptcache::worker
