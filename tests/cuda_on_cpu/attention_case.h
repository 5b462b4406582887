#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/attention.h"

namespace promptcache::gpu {

// A pass of attention with random contents, run on the device (or its
// emulation) and compared with a plain evaluation in double precision. Knows no
// gtest: also what tools and planted faults run.

// Tokens of KV; its pages lie anywhere.
struct ModuleSpec {
  uint32_t tokens = 0;
  uint32_t first_slot = 0;  // of its first page
  int32_t local_position = 0;
};
struct ViewSpec {
  size_t module = 0;
  int32_t position_offset = 0;
};
struct GroupSpec {
  uint32_t num_rows = 1;
  int32_t position = 0;
  std::vector<ViewSpec> visible;
  uint32_t own_tokens = 0;  // 0: sees the visible views alone
};

struct AttentionCase {
  std::string name;
  ElementType type = ElementType::kBf16;
  uint32_t head_dim = 64;
  uint32_t num_heads = 2;
  uint32_t num_kv_heads = 1;
  uint32_t page_tokens = 16;
  uint32_t num_multiprocessors = 4;
  std::vector<ModuleSpec> modules;
  std::vector<GroupSpec> groups;
  uint32_t rope_pairs = 0;  // 0: no rotation
  bool rope_interleaved = false;
  double rope_factor = 1;
  bool rotate_keys = false;
  bool alibi = false;
  int32_t bias_reach = -1;  // >= 0: a table of distances
  uint32_t window = 0;
  bool batch_invariant = false;
  // Blocks that are launched beyond the plan's, as a captured graph may.
  uint32_t surplus_blocks = 0;
  uint32_t seed = 1;
};

struct AttentionOutcome {
  // Empty, or what went wrong.
  std::string fault;
  // Largest over (row, head): |out - expected| / |expected|, Euclidean.
  double worst_error = 0;
  std::vector<uint16_t> out;  // [rows][heads][head_dim], bits
  // Of the launches, per ldmatrix: extra passes for bank conflicts.
  double bank_conflicts = 0;
};

// The error that rounding to the type explains.
double ToleranceOf(ElementType type);

AttentionOutcome RunAttentionCase(const AttentionCase& attention_case);

}  // namespace promptcache::gpu
