#pragma once

#include <cstdint>

namespace promptcache::worker {

// Bounds on what a damaged file can make the engine allocate; far above what
// any model has.
inline constexpr uint32_t kMaxLayers = 4096;
inline constexpr uint32_t kMaxDim = 1 << 24;
inline constexpr uint32_t kMaxContext = 1 << 27;

// Of T5: relative positions end nowhere, and what files state (n_positions,
// 512 where nothing is known) is read by nobody. A bound on the memory that one
// pass over a whole segment takes.
inline constexpr uint32_t kT5Context = 8192;

}  // namespace promptcache::worker
