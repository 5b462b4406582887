#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/rope.h"

namespace promptcache::gpu {

// Where a row's keys and values go: pages of the layout of
// common/kv_layout.h.
struct KvSlot {
  std::byte* page = nullptr;  // writable
  int32_t slot = 0;           // token of the page
  int32_t rotation = 0;       // the key's position in its span's own frame
};

// What a projection gave to what attention reads: adds the biases, norms the
// heads of q and k where there are such norms, writes q without rotation, and
// keys, rotated, and values to their pages.
struct SplitQkvParams {
  // [num_rows][stride]: num_heads heads of q, num_kv_heads of k, as many of v.
  const float* qkv = nullptr;
  const float* bias = nullptr;  // of all of them; may be null
  int32_t num_rows = 0;
  int32_t stride = 0;
  int32_t num_heads = 0;              // 0: there are no queries
  int32_t num_kv_heads = 0;           // 0: nothing is written to pages
  int32_t head_dim = 0;               // at most 256
  const float* query_norm = nullptr;  // [head_dim]; RMSNorm, may be null
  const float* key_norm = nullptr;    // likewise
  float epsilon = 0;
  uint16_t* queries = nullptr;  // [num_rows][num_heads][head_dim]
  // Keys and values.
  RopeView rope;
  const KvSlot* slots = nullptr;  // [num_rows]
  int32_t page_tokens = 0;
  uint64_t key_offset_bytes = 0;  // of the layer, in a page
  uint64_t value_offset_bytes = 0;
  bool fp16 = false;  // queries and pages; else bf16
};

// cudaErrorInvalidValue for a head_dim out of range.
cudaError_t LaunchSplitQkv(const SplitQkvParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
