// Merges the partial softmax states of rows that several blocks computed.

#include "cuda/kernels/attention_format.h"
#include "cuda/kernels/attention_merge.h"
#include "cuda/kernels/device.cuh"

namespace promptcache::gpu {
namespace {

__device__ __forceinline__ void Store(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16(value);
}
__device__ __forceinline__ void Store(__half* to, float value) {
  *to = __float2half(value);
}

// states: [state][num_heads][StateRowFloats]. Block x: a merged row, y: a head;
// a thread: an element. States are weighted by base-2 log-sum-exp and added in
// plan order; all empty gives zeros.
template <class T>
__global__ void AttentionMergeKernel(
    const __grid_constant__ AttentionParams p) {
  const auto& header = *reinterpret_cast<const AttentionPlanHeader*>(p.plan);
  if (blockIdx.x >= header.num_merged_rows || threadIdx.x >= p.head_dim) return;
  const AttentionMergedRow row = reinterpret_cast<const AttentionMergedRow*>(
      p.plan + header.merged_rows)[blockIdx.x];
  const size_t stride =
      static_cast<size_t>(p.num_heads) * StateRowFloats(p.head_dim);
  const float* const first =
      p.states + row.first_state * stride +
      static_cast<size_t>(blockIdx.y) * StateRowFloats(p.head_dim);
  float maximum = -INFINITY;
  for (uint32_t i = 0; i < row.num_states; ++i) {
    maximum = fmaxf(maximum, first[i * stride + p.head_dim]);
  }
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  float sum = 0;
  float out = 0;
  for (uint32_t i = 0; i < row.num_states; ++i) {
    const float weight = Exp2(first[i * stride + p.head_dim] - base);
    sum += weight;
    out += weight * first[i * stride + threadIdx.x];
  }
  Store(static_cast<T*>(p.out) + row.row * p.out_stride +
            static_cast<size_t>(blockIdx.y) * p.head_dim + threadIdx.x,
        sum > 0 ? out / sum : 0.0f);
}

}  // namespace

cudaError_t LaunchAttentionMerge(const AttentionParams& p,
                                 cudaStream_t stream) {
  if (p.grid.merged_rows == 0) return cudaSuccess;
  const dim3 grid(p.grid.merged_rows, p.num_heads);
  const dim3 block((p.head_dim + 31) / 32 * 32);
  return p.type == ElementType::kBf16
             ? Launch(AttentionMergeKernel<__nv_bfloat16>, grid, block, 0,
                      stream, p)
             : Launch(AttentionMergeKernel<__half>, grid, block, 0, stream, p);
}

}  // namespace promptcache::gpu
