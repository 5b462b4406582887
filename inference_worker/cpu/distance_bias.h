#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace promptcache::worker::cpu {

// What a head adds to its logits by the distance from a query to a key
// (position of the key minus position of the query); from `reach` on, in either
// direction, always the same. Immutable, thread-safe.
class DistanceBias {
 public:
  // value(head, distance) for distances -reach..reach. REQUIRES: reach >= 0.
  static DistanceBias Create(
      uint32_t num_heads, int32_t reach,
      absl::FunctionRef<float(uint32_t head, int32_t distance)> value);

  uint32_t num_heads() const { return num_heads_; }
  int32_t reach() const { return reach_; }

  // Of a head, in units of base-2 logits. Entry d + reach + kTileTokens is for
  // distance d: a whole tile that begins at any distance within
  // [-reach - kTileTokens, reach] lies in the row.
  const float* Row(uint32_t head) const { return table_.data() + head * row_; }
  size_t row_floats() const { return row_; }

 private:
  DistanceBias() = default;

  uint32_t num_heads_ = 0;
  int32_t reach_ = 0;
  size_t row_ = 0;
  std::vector<float> table_;  // [head][row_]
};

}  // namespace promptcache::worker::cpu
