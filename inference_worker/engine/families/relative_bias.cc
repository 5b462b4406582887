#include "inference_worker/engine/families/relative_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace promptcache::worker {

uint32_t RelativeBucket(int32_t distance, uint32_t buckets,
                        uint32_t max_distance, bool both_ways) {
  uint32_t first = 0;
  uint32_t away = static_cast<uint32_t>(std::abs(distance));
  if (both_ways) {
    buckets /= 2;
    if (distance > 0) first = buckets;
  } else if (distance > 0) {
    away = 0;
  }
  const uint32_t exact = buckets / 2;
  if (away < exact) return first + away;
  // Where a bucket begins at a whole number, the logarithms must not fall short
  // of it; no other distance comes that close.
  constexpr double kRounding = 1e-9;
  const double step = exact;
  const double part = std::log(away / step) / std::log(max_distance / step);
  const auto wide = static_cast<uint32_t>(part * (buckets - exact) + kRounding);
  return first + std::min(exact + wide, buckets - 1);
}

}  // namespace promptcache::worker
