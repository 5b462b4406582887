#pragma once

// Attention of a block of packed query rows over parts of views: what
// attention_hd*.cu instantiate. See attention.h for what is computed and
// attention_format.h for the work's description.
//
// A packed row is (query row, head): row r of a block is query row r / heads of
// the item, head r % heads of the block's. A block of 64 rows has four warps of
// 16 rows, each over all tokens of a tile; a block of 16 rows has warps that
// take 16 tokens of each tile and merge their states at the end. Tiles of keys
// and values are copied while the previous one is multiplied.
//
// Numerics: q rotated in fp32 from its unrotated value and rounded to T; logits
// and sums fp32; softmax online over tiles in base 2; probabilities rounded to
// T. A row's result depends on the sequence of tiles alone, not on other rows:
// tiles that it does not see change nothing.

#include "cuda/kernels/attention_block.cuh"
#include "cuda/kernels/attention_store.cuh"

namespace promptcache::gpu {

// How a thread's two rows see the part at hand.
struct RowLimits {
  int begin[2], end[2];  // tokens of the view
  int position[2];       // in the view's frame
};

template <class Block>
__device__ __forceinline__ RowLimits LimitsOf(const Block& block,
                                              const AttentionPart& part) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto window = static_cast<int>(block.p.window);
  RowLimits limits;
  for (int h = 0; h < 2; ++h) {
    const int row = Block::FirstRow() + lane / 4 + 8 * h;
    limits.begin[h] = limits.end[h] = limits.position[h] = 0;
    if (!block.Exists(row)) continue;
    const AttentionPartRow& seen =
        block.plan.part_rows[part.first_row +
                             static_cast<uint32_t>(block.QueryOf(row))];
    limits.position[h] = seen.frame_position;
    limits.end[h] = min(seen.end_token, static_cast<int>(part.end_token));
    if (window > 0) limits.begin[h] = max(0, seen.reach - window);
  }
  return limits;
}

// s = queries keys^T for this warp's rows and `tokens` tokens of the tile.
template <class T, int kHeadDim, int kRows>
__device__ __forceinline__ void MultiplyKeys(
    const AttentionBlock<T, kHeadDim, kRows>& block, T* tile, int tokens,
    const uint32_t (&queries)[kHeadDim / 16][4],
    float (&s)[AttentionBlock<T, kHeadDim, kRows>::kColumns][4]) {
  using Block = AttentionBlock<T, kHeadDim, kRows>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int n = 0; n < Block::kColumns / 2; ++n) {
    if (n * 16 >= tokens) break;  // short views cost steps of 16 tokens
    const int row = Block::FirstToken() + n * 16 + lane % 8 + (lane >> 4) * 8;
    // Without registers for queries there are none for many loads at once.
    [[maybe_unused]] constexpr int kUnroll =  // by the pragma of nvcc
        Block::Shape::kQueriesInRegisters ? Block::kSteps : 4;
#pragma unroll kUnroll
    for (int step = 0; step < Block::kSteps; ++step) {
      uint32_t k[4];
      LoadMatrix(k, Block::Rows::Chunk(tile, row, 2 * step + (lane >> 3 & 1)));
      if constexpr (Block::Shape::kQueriesInRegisters) {
        Mma16816(s[2 * n], queries[step], k[0], k[1], T());
        Mma16816(s[2 * n + 1], queries[step], k[2], k[3], T());
      } else {
        uint32_t q[4];
        block.LoadQueries(step, q);
        Mma16816(s[2 * n], q, k[0], k[1], T());
        Mma16816(s[2 * n + 1], q, k[2], k[3], T());
      }
    }
  }
}

// Logits in base 2, with their bias; minus infinity where a row does not see
// the token. `first` is the view's token of this warp's first column.
template <class Block, int kColumns>
__device__ __forceinline__ void BiasAndMask(const Block& block,
                                            const AttentionPart& part,
                                            const RowLimits& limits, int first,
                                            float (&s)[kColumns][4]) {
  const AttentionParams& p = block.p;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float scale = p.scale * kLog2E;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = block.HeadOf(Block::FirstRow() + lane / 4 + 8 * h);
    // A row that does not exist may name a head that does not.
    const bool exists = limits.end[h] > 0;
    const float slope = p.alibi_slopes == nullptr || !exists
                            ? 0.0f
                            : p.alibi_slopes[head] * kLog2E;
    const float* const bias =
        p.distance_bias == nullptr || !exists
            ? nullptr
            : p.distance_bias +
                  static_cast<size_t>(head) *
                      static_cast<size_t>(2 * p.bias_reach + 1) +
                  p.bias_reach;
    const int distance = part.local_position - limits.position[h];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = first + n * 8 + lane % 4 * 2 + e;
        float x = s[n][2 * h + e] * scale;
        x += slope * static_cast<float>(distance + token);
        if (bias != nullptr) {
          x += bias[max(-p.bias_reach, min(p.bias_reach, distance + token))] *
               kLog2E;
        }
        const bool seen = token >= limits.begin[h] && token < limits.end[h];
        s[n][2 * h + e] = seen ? x : kMinusInfinity;
      }
    }
  }
}

// Takes a tile's logits into the state: s becomes the probabilities.
template <int kHeadDim, int kColumns>
__device__ __forceinline__ void UpdateState(SoftmaxState<kHeadDim>* state,
                                            float (&s)[kColumns][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float maximum = state->maximum[h];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      maximum = fmaxf(maximum, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 2));
    // A row that has seen nothing yet: no infinity minus infinity.
    const float base = maximum == kMinusInfinity ? 0.0f : maximum;
    const float factor = Exp2(state->maximum[h] - base);
    state->maximum[h] = maximum;
    float sum = state->sum[h] * factor;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      s[n][2 * h] = Exp2(s[n][2 * h] - base);
      s[n][2 * h + 1] = Exp2(s[n][2 * h + 1] - base);
      sum += s[n][2 * h] + s[n][2 * h + 1];
    }
    state->sum[h] = sum;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      state->out[n][2 * h] *= factor;
      state->out[n][2 * h + 1] *= factor;
    }
  }
}

// out += probabilities values.
template <class T, int kHeadDim, int kRows>
__device__ __forceinline__ void MultiplyValues(
    const AttentionBlock<T, kHeadDim, kRows>&, T* tile, int tokens,
    const float (&s)[AttentionBlock<T, kHeadDim, kRows>::kColumns][4],
    SoftmaxState<kHeadDim>* state) {
  using Block = AttentionBlock<T, kHeadDim, kRows>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int k = 0; k < Block::kColumns / 2; ++k) {
    if (k * 16 >= tokens) break;
    const uint32_t weights[4] = {
        PackPair(s[2 * k][0], s[2 * k][1], T()),
        PackPair(s[2 * k][2], s[2 * k][3], T()),
        PackPair(s[2 * k + 1][0], s[2 * k + 1][1], T()),
        PackPair(s[2 * k + 1][2], s[2 * k + 1][3], T())};
    const int row = Block::FirstToken() + k * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) {
      uint32_t v[4];
      LoadMatrixTransposed(v, Block::Rows::Chunk(tile, row, 2 * n + lane / 16));
      Mma16816(state->out[2 * n], weights, v[0], v[1], T());
      Mma16816(state->out[2 * n + 1], weights, v[2], v[3], T());
    }
  }
}

// Block x: an item of the plan; y: a kv head and one of its head blocks.
template <class T, int kHeadDim, int kRows>
__global__ void __launch_bounds__(
    AttentionShapeOf<T, kHeadDim, kRows>::kThreads)
    AttentionKernel(const __grid_constant__ AttentionParams p) {
  using Block = AttentionBlock<T, kHeadDim, kRows>;
  using Shape = typename Block::Shape;
  const auto& header = *reinterpret_cast<const AttentionPlanHeader*>(p.plan);
  const bool large = kRows == kLargeBlockRows;
  if (blockIdx.x >= (large ? header.num_large_items : header.num_small_items)) {
    return;
  }
  PC_DYNAMIC_SHARED(memory);
  const PlanArrays plan = ArraysOf(p.plan);
  const HeadBlocks head_blocks = HeadBlocksOf(p.num_heads / p.num_kv_heads);
  const Block block = {
      p,
      plan,
      plan.items[blockIdx.x + (large ? 0 : header.num_large_items)],
      static_cast<int>(blockIdx.y / head_blocks.count),
      static_cast<int>(blockIdx.y % head_blocks.count * head_blocks.heads),
      static_cast<int>(head_blocks.heads),
      reinterpret_cast<T*>(memory),
      reinterpret_cast<T*>(memory + Shape::kQueryBytes),
      reinterpret_cast<T*>(memory + Shape::kQueryBytes +
                           2 * Shape::kTileBytes)};
  const AttentionPart* const parts = plan.parts + block.item.first_part;
  const auto num_parts = static_cast<int>(block.item.num_parts);

  SoftmaxState<kHeadDim> state;
  uint32_t queries[Block::kSteps][4];
  RowLimits limits = {};
  int current = -1;  // the part that queries and limits are for
  int buffer = 0;
  TileCursor at = {
      0, num_parts == 0 ? 0 : FirstTile<Shape::kTile>(parts[0], p.window)};
  at = Settle<Shape::kTile>(at, parts, num_parts, p.window);
  block.Fetch(at, buffer);
  while (at.part < num_parts) {
    const TileCursor next = Settle<Shape::kTile>(
        {at.part, at.token + Shape::kTile}, parts, num_parts, p.window);
    block.Fetch(next, buffer ^ 1);
    const AttentionPart& part = parts[at.part];
    bool turn = current < 0;
    if (p.rope != nullptr && !p.rotate_keys) {
      for (int i = current + 1; i <= at.part; ++i) {
        turn = turn || parts[i].same_frame == 0;
      }
    }
    if (turn) block.TurnQueries(part);
    if (current != at.part) limits = LimitsOf(block, part);
    current = at.part;
    CpAsyncWait<1>();
    __syncthreads();
    T* const keys = block.keys + buffer * (Shape::kTileBytes / sizeof(T));
    if (p.rotate_keys && p.rope != nullptr && part.position_offset != 0) {
      block.TurnKeys(part, keys);
      __syncthreads();
    }
    if (turn && Shape::kQueriesInRegisters) {
#pragma unroll
      for (int step = 0; step < Block::kSteps; ++step) {
        block.LoadQueries(step, queries[step]);
      }
    }
    const int first = at.token + Block::FirstToken();
    const int tokens =
        min(static_cast<int>(part.end_token) - first, Shape::kWarpTokens);
    const int last = max(limits.end[0], limits.end[1]);
    const int begin = min(limits.begin[0], limits.begin[1]);
    if (__any_sync(kAllLanes, first < last && begin < first + tokens)) {
      float s[Block::kColumns][4] = {};
      MultiplyKeys(block, keys, tokens, queries, s);
      BiasAndMask(block, part, limits, first, s);
      UpdateState<kHeadDim>(&state, s);
      MultiplyValues(block,
                     block.values + buffer * (Shape::kTileBytes / sizeof(T)),
                     tokens, s, &state);
    }
    __syncthreads();  // the next copy overwrites this buffer
    at = next;
    buffer ^= 1;
  }
  CpAsyncWait<0>();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    state.sum[h] += __shfl_xor_sync(kAllLanes, state.sum[h], 1);
    state.sum[h] += __shfl_xor_sync(kAllLanes, state.sum[h], 2);
  }
  if constexpr (Shape::kSplitTokens) {
    MergeWarps<T, kHeadDim>(block, state);
  } else {
    StoreRows<T, kHeadDim>(block, state);
  }
}

template <class T, int kHeadDim, int kRows>
cudaError_t LaunchBlocks(const AttentionParams& p, uint32_t num_items,
                         cudaStream_t stream) {
  if (num_items == 0) return cudaSuccess;
  using Shape = AttentionShapeOf<T, kHeadDim, kRows>;
  const HeadBlocks head_blocks = HeadBlocksOf(p.num_heads / p.num_kv_heads);
  return Launch(AttentionKernel<T, kHeadDim, kRows>,
                dim3(num_items, p.num_kv_heads * head_blocks.count),
                dim3(Shape::kThreads), Shape::kSharedBytes, stream, p);
}

template <int kHeadDim>
cudaError_t LaunchAttentionBlocks(const AttentionParams& p,
                                  cudaStream_t stream) {
  const auto launch = [&](auto type) {
    using T = decltype(type);
    const cudaError_t error = LaunchBlocks<T, kHeadDim, kLargeBlockRows>(
        p, p.grid.large_items, stream);
    return error != cudaSuccess ? error
                                : LaunchBlocks<T, kHeadDim, kSmallBlockRows>(
                                      p, p.grid.small_items, stream);
  };
  return p.type == ElementType::kBf16 ? launch(__nv_bfloat16())
                                      : launch(__half());
}

}  // namespace promptcache::gpu
