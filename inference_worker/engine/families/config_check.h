#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Of a head: what the kernels of every device can hold.
inline constexpr uint32_t kMaxHeadDim = 256;

// InvalidArgument, with the numbers, for a model that the forward pass cannot
// compute as its configuration says.
absl::Status CheckConfig(const ModelConfig& config);

}  // namespace promptcache::worker
