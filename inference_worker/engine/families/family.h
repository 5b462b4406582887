#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

enum class FeedForward { kSwiGlu };

// What a backend must know of an architecture beyond the numbers of its file
// (ModelConfig): the seam that other families are added at. Everything here is
// pre-norm with a sequential residual: attention, then the feed-forward block.
struct Family {
  std::string_view architecture;
  NormKind norm = NormKind::kRms;
  FeedForward feed_forward = FeedForward::kSwiGlu;
};

// InvalidArgument, with the known ones, for another architecture.
absl::StatusOr<Family> FamilyOf(const ModelConfig& config);

}  // namespace promptcache::worker
