// A warp a head. Grid: (blocks of kWarps heads, rows); the heads of a row are
// those of q, then of k, then of v.
//
// Numerics: fp32 up to one rounding to the 16-bit type. A head's norm sums its
// lanes' squares by butterfly, so its bits depend on nothing but the head.

#include "cuda/kernels/bf16.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/rope.cuh"
#include "cuda/kernels/split_qkv.h"

namespace promptcache::gpu {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kWarps = 4;

// Reads head `item` of a row to shared memory, biased and normed.
__device__ __forceinline__ void LoadHead(const SplitQkvParams& p, int row,
                                         int item, float* head) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int column = item * p.head_dim;
  const float* in = p.qkv + static_cast<int64_t>(row) * p.stride + column;
  float squares = 0.0f;
  for (int i = lane; i < p.head_dim; i += kWarpLanes) {
    float value = in[i];
    if (p.bias != nullptr) value += p.bias[column + i];
    head[i] = value;
    squares += value * value;
  }
  const float* weight = nullptr;
  if (item < p.num_heads) {
    weight = p.query_norm;
  } else if (item < p.num_heads + p.num_kv_heads) {
    weight = p.key_norm;
  }
  if (weight != nullptr) {
    const float mean = WarpSum(squares) / static_cast<float>(p.head_dim);
    const float scale = 1.0f / sqrtf(mean + p.epsilon);
    for (int i = lane; i < p.head_dim; i += kWarpLanes) {
      head[i] = head[i] * scale * weight[i];
    }
  }
  __syncwarp();  // a rotation reads what another lane wrote
}

template <bool kFp16>
__device__ __forceinline__ uint16_t ToBits(float value) {
  return kFp16 ? FloatToFp16(value) : FloatToBf16(value);
}

template <bool kFp16>
__global__ void __launch_bounds__(kWarps* kWarpLanes)
    SplitQkvKernel(SplitQkvParams p) {
  __shared__ float heads[kWarps][kMaxHeadDim];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int item = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (item >= p.num_heads + 2 * p.num_kv_heads) return;
  float* head = heads[warp];
  for (int row = static_cast<int>(blockIdx.y); row < p.num_rows;
       row += static_cast<int>(gridDim.y)) {
    LoadHead(p, row, item, head);
    if (item < p.num_heads) {
      uint16_t* out =
          p.queries +
          (static_cast<int64_t>(row) * p.num_heads + item) * p.head_dim;
      for (int i = lane; i < p.head_dim; i += kWarpLanes) {
        out[i] = ToBits<kFp16>(head[i]);
      }
    } else {
      const int kv_item = item - p.num_heads;
      const bool key = kv_item < p.num_kv_heads;
      const int kv_head = key ? kv_item : kv_item - p.num_kv_heads;
      const KvSlot slot = p.slots[row];
      const int64_t token =
          static_cast<int64_t>(kv_head) * p.page_tokens + slot.slot;
      auto* plane = reinterpret_cast<uint16_t*>(
          slot.page + (key ? p.key_offset_bytes : p.value_offset_bytes));
      uint16_t* out = plane + token * p.head_dim;
      for (int i = lane; i < p.head_dim; i += kWarpLanes) {
        const float value =
            key ? Rotated(p.rope, head, i, slot.rotation) : head[i];
        out[i] = ToBits<kFp16>(value);
      }
    }
    __syncwarp();  // before the next row's head is loaded
  }
}

}  // namespace

cudaError_t LaunchSplitQkv(const SplitQkvParams& params, cudaStream_t stream) {
  if (params.head_dim <= 0 || params.head_dim > kMaxHeadDim) {
    return cudaErrorInvalidValue;
  }
  const int items = params.num_heads + 2 * params.num_kv_heads;
  if (params.num_rows == 0 || items == 0) return cudaSuccess;
  constexpr int kMaxGridRows = 65535;
  const int rows =
      params.num_rows < kMaxGridRows ? params.num_rows : kMaxGridRows;
  const dim3 grid(static_cast<unsigned>((items + kWarps - 1) / kWarps),
                  static_cast<unsigned>(rows));
  const dim3 block(kWarps * kWarpLanes);
  return params.fp16
             ? Launch(SplitQkvKernel<true>, grid, block, 0, stream, params)
             : Launch(SplitQkvKernel<false>, grid, block, 0, stream, params);
}

}  // namespace promptcache::gpu
