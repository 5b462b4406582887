#pragma once

// Where a block's softmax states go: to the result, or to memory for
// attention_merge.cu.

#include "cuda/kernels/attention_block.cuh"

namespace promptcache::gpu {

// Two elements of a packed row's output: to the result, or to the row's state.
template <class T, int kHeadDim, class Block>
__device__ __forceinline__ void StorePair(const Block& block, int row, int at,
                                          float low, float high) {
  const AttentionParams& p = block.p;
  const AttentionItemRow& to =
      block.plan.item_rows[block.item.first_row +
                           static_cast<uint32_t>(block.QueryOf(row))];
  const auto head = static_cast<size_t>(block.HeadOf(row));
  if (to.state < 0) {
    T* const out = static_cast<T*>(p.out) +
                   static_cast<size_t>(to.row) * p.out_stride +
                   head * kHeadDim + at;
    *reinterpret_cast<uint32_t*>(out) = PackPair(low, high, T());
    return;
  }
  float* const out =
      p.states + (static_cast<size_t>(to.state) * p.num_heads + head) *
                     StateRowFloats(kHeadDim);
  *reinterpret_cast<float2*>(out + at) = make_float2(low, high);
}

template <int kHeadDim, class Block>
__device__ __forceinline__ void StoreLogSum(const Block& block, int row,
                                            float maximum, float sum) {
  const AttentionItemRow& to =
      block.plan.item_rows[block.item.first_row +
                           static_cast<uint32_t>(block.QueryOf(row))];
  if (to.state < 0) return;
  const size_t at = static_cast<size_t>(to.state) * block.p.num_heads +
                    static_cast<size_t>(block.HeadOf(row));
  block.p.states[at * StateRowFloats(kHeadDim) + kHeadDim] =
      sum > 0 ? maximum + log2f(sum) : kMinusInfinity;
}

// Of 64 rows: each warp has its rows' whole states.
template <class T, int kHeadDim, class Block>
__device__ __forceinline__ void StoreRows(const Block& block,
                                          const SoftmaxState<kHeadDim>& state) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = Block::FirstRow() + lane / 4 + 8 * h;
    if (!block.Exists(row)) continue;
    const float inverse = state.sum[h] > 0 ? 1.0f / state.sum[h] : 0.0f;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      StorePair<T, kHeadDim>(block, row, n * 8 + lane % 4 * 2,
                             state.out[n][2 * h] * inverse,
                             state.out[n][2 * h + 1] * inverse);
    }
    if (lane % 4 == 0) {
      StoreLogSum<kHeadDim>(block, row, state.maximum[h], state.sum[h]);
    }
  }
}

// Of 16 rows: the warps' states meet in shared memory, where the tiles were.
template <class T, int kHeadDim, class Block>
__device__ __forceinline__ void MergeWarps(
    const Block& block, const SoftmaxState<kHeadDim>& state) {
  constexpr int kWarps = Block::Shape::kWarps;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float* const maxima = reinterpret_cast<float*>(block.keys);  // [warp][16]
  float* const sums = maxima + kWarps * 16;                    // [warp][16]
  float* const outs = sums + kWarps * 16;  // [warp][16][kHeadDim]
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int place = Block::Warp() * 16 + lane / 4 + 8 * h;
    if (lane % 4 == 0) {
      maxima[place] = state.maximum[h];
      sums[place] = state.sum[h];
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<float2*>(outs + place * kHeadDim + n * 8 +
                                 lane % 4 * 2) =
          make_float2(state.out[n][2 * h], state.out[n][2 * h + 1]);
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < 16 * kHeadDim / 2;
       c += Block::Shape::kThreads) {
    const int row = c / (kHeadDim / 2);
    const int at = c % (kHeadDim / 2) * 2;
    if (!block.Exists(row)) continue;
    float maximum = kMinusInfinity;
    for (int w = 0; w < kWarps; ++w) {
      maximum = fmaxf(maximum, maxima[w * 16 + row]);
    }
    const float base = maximum == kMinusInfinity ? 0.0f : maximum;
    float sum = 0;
    float2 out = make_float2(0, 0);
    for (int w = 0; w < kWarps; ++w) {
      const float weight = Exp2(maxima[w * 16 + row] - base);
      const float2 part = *reinterpret_cast<const float2*>(
          outs + (w * 16 + row) * kHeadDim + at);
      sum += weight * sums[w * 16 + row];
      out.x += weight * part.x;
      out.y += weight * part.y;
    }
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    StorePair<T, kHeadDim>(block, row, at, out.x * inverse, out.y * inverse);
    if (at == 0) StoreLogSum<kHeadDim>(block, row, maximum, sum);
  }
}

}  // namespace promptcache::gpu
