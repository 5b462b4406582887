#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kv_view.h"
#include "inference_worker/cpu/activation.h"
#include "inference_worker/cpu/panel_layout.h"

// What one instruction set implements: a table of functions, one translation
// unit a set, compiled with that set's target flags. Those units see plain
// structs only: an inline function or a std:: template that they instantiated
// could be the copy that the linker keeps for everybody.

namespace promptcache::worker::cpu {

// Tokens that a view is split into, from its first token: parts whose softmax
// is computed alone and merged in order, and the tiles inside them.
inline constexpr uint32_t kSegmentTokens = 256;
inline constexpr uint32_t kTileTokens = 64;
inline constexpr uint32_t kMaxHeadDim = 256;
// Query rows times heads of one kv head that share an unpacked tile.
inline constexpr uint32_t kMaxPackedRows = 128;
// Floats before the head_dim sums of a softmax state: maximum (base 2), sum.
inline constexpr uint32_t kStateHeader = 16;

// Rows [0, num_rows) of A times consecutive panels.
struct GemmBlock {
  // fp32 rows, or what prepare_rows made of them.
  const void* a = nullptr;
  size_t a_stride = 0;  // floats
  uint32_t num_rows = 0;
  uint32_t depth = 0;  // K
  const uint16_t* panels = nullptr;
  size_t panel_elements = 0;
  uint32_t num_cols = 0;  // output columns of these panels
  // At the first of those columns.
  float* c = nullptr;
  size_t c_stride = 0;
  const float* bias = nullptr;
  const float* residual = nullptr;
};

struct RopeView {
  const float* table = nullptr;  // [position][cos | sin][pair]; null: none
  uint32_t num_pairs = 0;
  bool interleaved = false;
};

// Tokens [first_token, first_token + num_tokens) of a view.
struct AttentionSegment {
  const KvView* view = nullptr;
  uint32_t first_token = 0;
  uint32_t num_tokens = 0;
  bool own = false;  // causal: see AttentionTask::own_limit
  // Tokens of the group that stand before it in plan order.
  int64_t tokens_before = 0;
};

// AttentionTask::window_begin of rows that see everything.
inline constexpr int64_t kNoWindow = -(int64_t{1} << 62);

// A row of a task whose rows are of several groups.
struct AttentionRow {
  const float* queries = nullptr;  // at the first of the heads
  // Relative to the segments' view as the row's own is to its group's.
  int32_t position = 0;
};

// Some query rows of one group, for the heads of one kv head, over some of the
// group's segments.
struct AttentionTask {
  const float* queries = nullptr;  // at the first row, first of the heads
  size_t query_stride = 0;
  float* out = nullptr;
  size_t out_stride = 0;
  uint32_t num_rows = 0;
  uint32_t heads_per_kv = 0;
  uint32_t head_dim = 0;
  int32_t position = 0;    // of the first row
  uint32_t own_limit = 0;  // own tokens that the first row sees; the next, + 1
  // Tokens in plan order before the first one that the first row sees; the
  // next row's, + 1.
  int64_t window_begin = kNoWindow;
  // Not null: num_rows rows of several groups, all of which see all of the
  // segments in full; `states` is set, queries, out and position are not.
  const AttentionRow* rows = nullptr;
  float scale = 0;
  RopeView rope;
  // Of the heads: added to the scaled logit, times key minus query position.
  // Null: nothing is added.
  const float* alibi_slopes = nullptr;
  // Of the first of the heads (DistanceBias::Row, which says what lies where),
  // the next one's `bias_stride` floats on. Null: nothing is added.
  const float* bias = nullptr;
  size_t bias_stride = 0;
  int32_t bias_reach = 0;
  // Of the kv head's keys and values in a page, in bytes.
  size_t key_offset = 0;
  size_t value_offset = 0;
  uint32_t page_tokens = 0;
  const AttentionSegment* segments = nullptr;
  uint32_t num_segments = 0;
  // Null: merges the segments and writes `out`. Else a state per segment and
  // packed row: [segment][row * heads_per_kv + head][kStateHeader + head_dim].
  float* states = nullptr;
  // For merge_states: where the states of each segment's rows begin.
  float* const* segment_states = nullptr;
  std::byte* scratch = nullptr;  // kAttentionScratchBytes, 64-byte aligned
};

// Keys and values of a tile as fp32; rotated queries; two states a packed row;
// probabilities; for a matrix unit: logits and sums of 16 rows, keys, values,
// queries and weights as bf16.
inline constexpr size_t kAttentionScratchBytes =
    sizeof(float) *
        (2 * kTileTokens * kMaxHeadDim + kMaxPackedRows * kMaxHeadDim +
         2 * kMaxPackedRows * (kStateHeader + kMaxHeadDim) + 16 * kTileTokens +
         16 * (kTileTokens + kMaxHeadDim)) +
    sizeof(uint16_t) *
        (2 * kTileTokens * kMaxHeadDim + 2 * kMaxPackedRows * kMaxHeadDim +
         2 * 16 * kTileTokens);

struct IsaKernels {
  const char* name;
  PanelLayout layout;
  uint32_t panel_cols;
  // Rows of A that a task multiplies with a run of panels, at most; tile_rows
  // of them at a time.
  uint32_t block_rows;
  uint32_t tile_rows;
  // Bytes that prepare_rows writes; 0: the GEMM reads fp32 rows as they are.
  size_t (*prepared_bytes)(uint32_t num_rows, uint32_t depth);
  void (*prepare_rows)(const float* a, size_t a_stride, uint32_t num_rows,
                       uint32_t depth, void* out);
  void (*gemm)(const GemmBlock& block);

  void (*attend)(const AttentionTask& task);
  // Merges the states of `num_segments` segments in order (as `attend` does
  // when it has all of them) and writes the rows' outputs.
  void (*merge_states)(const AttentionTask& task);

  void (*rms_norm)(const float* x, const float* weight, float epsilon,
                   size_t dim, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias,
                     float epsilon, size_t dim, float* out);
  void (*activate)(Activation activation, const float* x, const float* up,
                   size_t count, float* out);
  void (*add)(const float* y, size_t count, float* x);
  void (*scale)(float factor, size_t count, float* x);
  void (*to_bf16)(const float* x, size_t count, uint16_t* out);
  // One head at `position`, to bf16.
  void (*rotate_to_bf16)(const float* x, const RopeView& rope, int32_t position,
                         uint32_t head_dim, uint16_t* out);
};

// Null where the compiler cannot make them.
const IsaKernels* PortableKernels();
const IsaKernels* Avx2Kernels();
const IsaKernels* Avx512Kernels();
const IsaKernels* Avx512Bf16Kernels();
const IsaKernels* AmxKernels();

}  // namespace promptcache::worker::cpu
