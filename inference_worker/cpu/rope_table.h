#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache::worker::cpu {

enum class Pairing {
  kHalfSplit,    // element i turns with i + dims / 2
  kInterleaved,  // element 2i turns with 2i + 1
};

// Cosines and sines of position * inv_freq[pair], computed in double and kept
// as fp32, for positions -max_position..max_position (the cosine is even, the
// sine odd). Immutable, thread-safe.
class RopeTable {
 public:
  struct Options {
    // One frequency per pair: 2 * inv_freq.size() elements of a head turn, the
    // rest is left alone. Scalings are the caller's: they end up here.
    std::vector<double> inv_freq;
    // Multiplies every rotated element (YaRN's attention factor).
    double factor = 1.0;
    Pairing pairing = Pairing::kHalfSplit;
    int32_t max_position = 0;
  };

  // InvalidArgument: no pair, a frequency or factor that is not finite, a
  // position below 0 or above 2^24.
  static absl::StatusOr<RopeTable> Create(const Options& options);
  // theta^(-2i/dims), i < dims / 2: RoPE without scaling.
  static std::vector<double> PlainFrequencies(double theta, uint32_t dims);

  uint32_t num_pairs() const { return num_pairs_; }
  uint32_t dims() const { return 2 * num_pairs_; }
  int32_t max_position() const { return max_position_; }
  Pairing pairing() const { return pairing_; }

  // num_pairs() values. REQUIRES: |position| <= max_position(), non-negative.
  const float* Cos(int32_t position) const {
    return table_.data() + static_cast<size_t>(position) * 2 * num_pairs_;
  }
  const float* Sin(int32_t position) const {
    return Cos(position) + num_pairs_;
  }

 private:
  RopeTable() = default;

  uint32_t num_pairs_ = 0;
  int32_t max_position_ = 0;
  Pairing pairing_ = Pairing::kHalfSplit;
  // [position][cos | sin][pair]
  std::vector<float> table_;
};

}  // namespace promptcache::worker::cpu
