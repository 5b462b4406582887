#pragma once

#include <cstddef>

#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Dequantises one block to as many floats as the type's blocks have elements.
using DequantizeBlock = void (*)(const std::byte* block, float* out);

// Null for the types that are not quantised.
DequantizeBlock DequantizeBlockOf(TensorType type);

}  // namespace promptcache::worker
