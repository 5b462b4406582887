#pragma once

#include <cstdint>

namespace promptcache::worker {

// Bounds on what a damaged file can make the engine allocate; far above what
// any model has.
inline constexpr uint32_t kMaxLayers = 4096;
inline constexpr uint32_t kMaxDim = 1 << 24;
inline constexpr uint32_t kMaxContext = 1 << 27;

}  // namespace promptcache::worker
