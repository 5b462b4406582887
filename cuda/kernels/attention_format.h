#pragma once

#include <cstddef>
#include <cstdint>

// What AttentionPlan writes and the attention kernels read: one buffer, a
// header and arrays at byte offsets from it.

namespace promptcache::gpu {

// Query rows x heads that a block computes.
inline constexpr uint32_t kLargeBlockRows = 64;
inline constexpr uint32_t kSmallBlockRows = 16;

// Tokens of a tile of keys: two of them and two of values fit the shared
// memory that every device has. Tiles begin at multiples of it from a view's
// first token.
constexpr uint32_t AttentionTileTokens(uint32_t head_dim) {
  return head_dim <= 128 ? 64 : 32;
}

// The heads of one kv head are packed with query rows, at most 16 at a time.
struct HeadBlocks {
  uint32_t count;  // blocks that a kv head's heads are cut into
  uint32_t heads;  // of each; the last may have fewer
};
constexpr HeadBlocks HeadBlocksOf(uint32_t heads_per_kv) {
  const uint32_t count = (heads_per_kv + 15) / 16;
  return {count, (heads_per_kv + count - 1) / count};
}

// Floats between two rows of partial states: [head_dim] the normalised output,
// then its log-sum-exp (base 2), then nothing.
constexpr uint32_t StateRowFloats(uint32_t head_dim) { return head_dim + 4; }

struct AttentionPlanHeader {
  uint32_t num_large_items = 0;
  uint32_t num_small_items = 0;
  uint32_t num_merged_rows = 0;
  // Byte offsets. Small items follow the large ones.
  uint32_t items = 0;
  uint32_t parts = 0;
  uint32_t item_rows = 0;
  uint32_t part_rows = 0;
  uint32_t merged_rows = 0;
  uint32_t pages = 0;
  uint32_t unused = 0;
};

// One block's work: query rows over parts, in order.
struct AttentionItem {
  uint32_t first_part = 0;
  uint32_t num_parts = 0;
  uint32_t first_row = 0;  // of item_rows
  uint32_t num_rows = 0;
};

struct AttentionItemRow {
  int32_t row = 0;     // of q and out
  int32_t state = -1;  // where the partial state goes; -1: it is the result
};

// Tokens [first_token, end_token) of a view; first_token is a tile's first.
struct AttentionPart {
  uint32_t first_page = 0;  // of pages: where the view's token 0 lies,
  uint32_t first_slot = 0;  // at this slot
  uint32_t first_token = 0;
  uint32_t end_token = 0;
  uint32_t first_row = 0;       // of part_rows, parallel to the item's rows
  int32_t min_reach = 0;        // of those
  int32_t local_position = 0;   // of token 0
  int32_t position_offset = 0;  // of all rows; read only when keys are rotated
  // The rows' frame positions are those of the part before.
  uint32_t same_frame = 0;
};

// A query row as it meets a part's view.
struct AttentionPartRow {
  int32_t frame_position = 0;  // the row's position in the view's frame
  int32_t end_token = 0;       // sees tokens of the view below this one
  // Tokens that the row sees from the view's token 0 on, in plan order: with a
  // window it sees only tokens from reach - window on.
  int32_t reach = 0;
};

struct AttentionMergedRow {
  uint32_t row = 0;
  uint32_t first_state = 0;
  uint32_t num_states = 0;
};

}  // namespace promptcache::gpu
