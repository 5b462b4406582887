#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/kv_view.h"
#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_format.h"

namespace promptcache::gpu {

// Query rows of consecutive tokens of one span.
struct AttentionGroup {
  uint32_t first_row = 0;  // in q and out
  uint32_t num_rows = 0;
  int32_t position = 0;  // of the first row
  // Seen in full, in plan order. `pages` of these is a host table of the pages'
  // device addresses.
  std::span<const KvView> visible;
  // The rows' own span, after those: row r sees its first
  // own.num_tokens - num_rows + r + 1 tokens. Without tokens: rows see the
  // visible views and nothing else.
  KvView own;
};

// Cuts the attention of a pass into blocks' work, for all layers: query rows
// times ranges of keys, and which rows' partial states are merged. Views that
// several groups with few rows see alike are read once for all of them.
//
// Thread-compatible; kept between passes for its memory. Knows neither CUDA nor
// a device: bytes() is what the kernels read, at any address.
class AttentionPlan {
 public:
  struct Options {
    uint32_t head_dim = 0;
    uint32_t num_heads = 0;
    uint32_t num_kv_heads = 0;
    uint32_t page_tokens = 16;
    // Of the device: decides into how many parts the keys of few rows are cut.
    uint32_t num_multiprocessors = 1;
    // A row's result then depends on what it sees and on nothing else, neither
    // on other rows nor on how a span was cut into passes: views are split at
    // fixed token counts from their beginning, by one kernel. Costs memory for
    // states: rows x (views + tokens / kInvariantSplitTokens).
    bool batch_invariant = false;
    // For AttentionParams::rotate_keys: what is shared then has one offset.
    bool rotate_keys = false;
  };
  static constexpr uint32_t kInvariantSplitTokens = 512;

  // REQUIRES: num_heads a multiple of num_kv_heads, page_tokens not 0,
  // own.num_tokens is 0 or at least num_rows, no row in two groups.
  void Build(const Options& options, std::span<const AttentionGroup> groups);

  // To be copied to the device, to a multiple of 16 bytes.
  std::span<const std::byte> bytes() const { return bytes_; }
  AttentionGrid grid() const { return grid_; }
  // Of AttentionParams::states.
  size_t StateBytes() const { return state_bytes_; }

 private:
  std::vector<std::byte> bytes_;
  AttentionGrid grid_;
  size_t state_bytes_ = 0;
};

}  // namespace promptcache::gpu
