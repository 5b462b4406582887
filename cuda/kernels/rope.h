#pragma once

#include <cstdint>

namespace promptcache::gpu {

// Cosines and sines of whole positions, made in double on the host and kept as
// fp32 in device memory (engine/families/positions.h says of which angles).
// Elements of a head beyond the first 2 * num_pairs are left alone. The cosine
// is even and the sine odd, so that the table serves -max..max.
struct RopeView {
  const float* table = nullptr;  // [position][cos | sin][pair]; null: no RoPE
  int32_t num_pairs = 0;
  // Element 2i turns with 2i + 1; else element i with i + num_pairs.
  bool interleaved = false;
};

}  // namespace promptcache::gpu
