#pragma once

#include <vector>

#include "attention_case.h"

namespace promptcache::gpu {

// Head sizes that the emulated kernels have; the first two are there for tests
// alone.
inline constexpr uint32_t kHeadDims[] = {16, 32, 64, 80, 96, 128, 256};

// Rows x lengths {0, 1, tile - 1, tile, tile + 1, about a thousand} x heads per
// kv head x number of views, with offsets, rotations, biases and windows in
// turn. `full` takes the whole product and longer views (700 cases), else 24.
std::vector<AttentionCase> SweepCases(ElementType type, uint32_t head_dim,
                                      bool full);

// A few cases through every path of the kernels: for the sanitizers.
std::vector<AttentionCase> QuickCases();

}  // namespace promptcache::gpu
