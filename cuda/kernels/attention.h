#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace promptcache::gpu {

enum class ElementType : uint32_t { kBf16, kFp16 };

// How many blocks each kernel of a plan needs. A launch may ask for more: the
// surplus ends at once, and so a captured graph can serve plans that grow.
struct AttentionGrid {
  uint32_t large_items = 0;  // blocks of up to 64 query rows x heads
  uint32_t small_items = 0;  // of up to 16: decoding
  uint32_t merged_rows = 0;  // query rows with more than one partial state
};

// One layer's attention of all rows of a pass. All pointers are of the device.
struct AttentionParams {
  ElementType type = ElementType::kBf16;  // of q, out, keys and values
  uint32_t head_dim = 0;                  // 64, 80, 96, 128 or 256
  uint32_t num_heads = 0;                 // a multiple of num_kv_heads
  uint32_t num_kv_heads = 0;

  // A copy of AttentionPlan::bytes(), at a multiple of 16; `grid` at least
  // AttentionPlan::grid().
  const std::byte* plan = nullptr;
  AttentionGrid grid;
  // Of AttentionPlan::StateBytes() at least, at a multiple of 16; null when
  // there is nothing to merge.
  float* states = nullptr;

  // [rows][num_heads][head_dim], not rotated; rows `q_stride` elements apart;
  // strides are multiples of 8.
  const void* q = nullptr;
  size_t q_stride = 0;
  void* out = nullptr;  // [rows][num_heads][head_dim], likewise
  size_t out_stride = 0;

  // Within a page: KvLayout::key_offset_bytes(layer), value_offset_bytes(layer)
  // and head_stride_bytes(). Pages and these lie at multiples of 16 bytes.
  size_t key_offset_bytes = 0;
  size_t value_offset_bytes = 0;
  size_t head_stride_bytes = 0;
  uint32_t page_tokens = 16;  // a power of two

  float scale = 0;  // of the logits
  // Cosines and sines: [position][cos | sin][pair], fp32; element i turns with
  // i + rope_pairs (half-split), or 2i with 2i + 1 (interleaved); elements from
  // 2 * rope_pairs on are left alone. Null: nothing is rotated. rope_pairs is
  // even. The absolute difference of a row's position and a view's
  // position_offset must lie within the table.
  const float* rope = nullptr;
  uint32_t rope_pairs = 0;
  bool rope_interleaved = false;
  // What the table's cosines and sines are multiplied with (YaRN's attention
  // factor). With rotate_keys only.
  float rope_factor = 1;
  // Rotates each tile of keys by its view's offset instead of rotating the
  // queries into the view's frame; slower and rounds once more. The plan must
  // be built for it.
  bool rotate_keys = false;

  // ALiBi: added to a head's scaled logit times (position of the key minus
  // position of the query), [num_heads]. Null: none.
  const float* alibi_slopes = nullptr;
  // T5: added to the scaled logit by the same difference, which is limited to
  // -bias_reach..bias_reach: [num_heads][2 * bias_reach + 1]. Null: none.
  const float* distance_bias = nullptr;
  int32_t bias_reach = 0;
  // A row sees the last `window` tokens of all that it would see in plan
  // order, itself included. 0: all.
  uint32_t window = 0;
};

// Whether the kernels were compiled for heads of that size.
bool HasAttention(uint32_t head_dim);

// Softmax attention of every row over what the plan says that it sees: at most
// three kernels on `stream`. Sums are fp32, softmax in base 2, probabilities
// are rounded to `type` for the product with the values; a row that sees
// nothing gives zeros. cudaErrorInvalidValue for parameters that break a rule
// above.
cudaError_t LaunchAttention(const AttentionParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
