#include "inference_worker/cpu/distance_bias.h"

#include <algorithm>
#include <numbers>

#include "glog/logging.h"
#include "inference_worker/cpu/isa_kernels.h"

namespace promptcache::worker::cpu {

DistanceBias DistanceBias::Create(
    uint32_t num_heads, int32_t reach,
    absl::FunctionRef<float(uint32_t, int32_t)> value) {
  CHECK_GE(reach, 0);
  constexpr auto kTile = static_cast<int32_t>(kTileTokens);
  DistanceBias bias;
  bias.num_heads_ = num_heads;
  bias.reach_ = reach;
  bias.row_ = 2 * static_cast<size_t>(reach + kTile) + 1;
  bias.table_.reserve(num_heads * bias.row_);
  for (uint32_t head = 0; head < num_heads; ++head) {
    for (int32_t d = -reach - kTile; d <= reach + kTile; ++d) {
      const double natural = value(head, std::clamp(d, -reach, reach));
      bias.table_.push_back(static_cast<float>(natural * std::numbers::log2e));
    }
  }
  return bias;
}

}  // namespace promptcache::worker::cpu
