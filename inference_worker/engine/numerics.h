#pragma once

#include <string_view>

#include "absl/status/statusor.h"

namespace promptcache::worker {

// What weights are multiplied as. Part of the model's identity in module keys.
enum class Numerics {
  kAuto,   // kFast where a file has matrices for it, else kExact
  kExact,  // weights as bf16, activations as the kernels take them
  // Quantised matrices as they are, times activations of 8 bits; other
  // matrices as in kExact.
  kFast,
};

// "auto", "exact" or "fast"; InvalidArgument for anything else.
absl::StatusOr<Numerics> ParseNumerics(std::string_view name);

}  // namespace promptcache::worker
