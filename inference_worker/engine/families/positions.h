#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// How far each pair of a head turns from one position to the next, in radians,
// and what every rotated element is multiplied with.
struct Rotation {
  std::vector<double> inv_freq;
  double factor = 1;
};

// Of a layer: `local` ones (Gemma 3's sliding layers) have a base of their own
// and no scaling. Computed in double. InvalidArgument for a scaling whose
// numbers make no sense.
absl::StatusOr<Rotation> RotationOf(const ModelConfig& config, bool local);

// ALiBi's slope of each head, times the scale of the logits where the bias is
// added before it. With a number of heads that is not a power of two, those of
// the next power of two: every other one first, then those between.
std::vector<float> AlibiSlopes(const ModelConfig& config);

// Of the logits: 1 / sqrt(head_dim) unless the file says otherwise.
float AttentionScale(const ModelConfig& config);

}  // namespace promptcache::worker
