#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_merge.h"

namespace promptcache::gpu {

// Defined and instantiated in attention_hd*.cu.
template <int kHeadDim>
cudaError_t LaunchAttentionBlocks(const AttentionParams& params,
                                  cudaStream_t stream);

namespace {

bool IsAligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

bool IsValid(const AttentionParams& p) {
  const bool shape = p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0 &&
                     p.page_tokens > 0 &&
                     (p.page_tokens & (p.page_tokens - 1)) == 0 &&
                     p.bias_reach >= 0;
  const bool layout = p.q_stride % 8 == 0 && p.out_stride % 8 == 0 &&
                      p.key_offset_bytes % 16 == 0 &&
                      p.value_offset_bytes % 16 == 0 &&
                      p.head_stride_bytes % 16 == 0;
  const bool pointers = p.plan != nullptr && p.q != nullptr &&
                        p.out != nullptr && IsAligned(p.plan, 16) &&
                        IsAligned(p.q, 16) && IsAligned(p.out, 16) &&
                        IsAligned(p.states, 16) && IsAligned(p.rope, 16);
  const bool rotation = p.rope == nullptr ||
                        (p.rope_pairs > 0 && p.rope_pairs % 2 == 0 &&
                         2 * p.rope_pairs <= p.head_dim && p.rope_factor != 0);
  const bool states = p.grid.merged_rows == 0 || p.states != nullptr;
  return shape && layout && pointers && rotation && states;
}

cudaError_t LaunchBlocks(const AttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
#ifdef PC_KERNELS_TEST_HEAD_DIMS
    case 16:
      return LaunchAttentionBlocks<16>(p, stream);
    case 32:
      return LaunchAttentionBlocks<32>(p, stream);
#endif
    case 64:
      return LaunchAttentionBlocks<64>(p, stream);
    case 80:
      return LaunchAttentionBlocks<80>(p, stream);
    case 96:
      return LaunchAttentionBlocks<96>(p, stream);
    case 128:
      return LaunchAttentionBlocks<128>(p, stream);
    case 256:
      return LaunchAttentionBlocks<256>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

bool HasAttention(uint32_t head_dim) {
#ifdef PC_KERNELS_TEST_HEAD_DIMS
  if (head_dim == 16 || head_dim == 32) return true;
#endif
  return head_dim == 64 || head_dim == 80 || head_dim == 96 ||
         head_dim == 128 || head_dim == 256;
}

cudaError_t LaunchAttention(const AttentionParams& params,
                            cudaStream_t stream) {
  if (params.grid.large_items == 0 && params.grid.small_items == 0) {
    return cudaSuccess;
  }
  if (!IsValid(params)) return cudaErrorInvalidValue;
  const cudaError_t error = LaunchBlocks(params, stream);
  return error != cudaSuccess ? error : LaunchAttentionMerge(params, stream);
}

}  // namespace promptcache::gpu
