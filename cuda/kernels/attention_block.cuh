#pragma once

// What the attention kernels are made of: the layout of rows in shared memory,
// the walk over the plan, and a block's copies and rotations
// (attention_kernel.cuh).

#include "cuda/kernels/attention.h"
#include "cuda/kernels/attention_format.h"
#include "cuda/kernels/device.cuh"

namespace promptcache::gpu {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kMinusInfinity = -INFINITY;

__device__ __forceinline__ uint32_t PackPair(float low, float high,
                                             __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
__device__ __forceinline__ uint32_t PackPair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}
__device__ __forceinline__ float2 UnpackPair(uint32_t bits, __nv_bfloat16) {
  return make_float2(__uint_as_float(bits << 16),
                     __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ float2 UnpackPair(uint32_t bits, __half) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &bits, sizeof bits);
  return __half22float2(pair);
}

// Rows of a head in shared memory, 16-byte chunks placed so that the 8 rows
// that ldmatrix reads at once lie in different banks: by a swizzle where a
// row's chunks come in eights, else by a row stride of an odd number of chunks.
template <class T, int kHeadDim>
struct SharedRows {
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr bool kSwizzled = kChunks % 8 == 0;
  static constexpr int kStride =
      kSwizzled ? kChunks : (kChunks % 2 == 0 ? kChunks + 1 : kChunks);
  static constexpr size_t Bytes(int rows) {
    return static_cast<size_t>(rows) * kStride * 16;
  }
  __device__ __forceinline__ static T* Chunk(T* base, int row, int chunk) {
    const int place = kSwizzled ? chunk ^ (row & 7) : chunk;
    return base + (row * kStride + place) * 8;
  }
  // An even element and the next one.
  __device__ __forceinline__ static uint32_t* Pair(T* base, int row, int at) {
    return reinterpret_cast<uint32_t*>(Chunk(base, row, at / 8) + at % 8);
  }
};

template <class T, int kHeadDim, int kRows>
struct AttentionShapeOf {
  static constexpr int kTile = static_cast<int>(AttentionTileTokens(kHeadDim));
  // Of 16 rows all warps share, of 64 each has 16.
  static constexpr bool kSplitTokens = kRows == kSmallBlockRows;
  static constexpr int kWarps = kSplitTokens ? kTile / 16 : kRows / 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpTokens = kSplitTokens ? 16 : kTile;
  // Larger heads leave no registers for them.
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  using Rows = SharedRows<T, kHeadDim>;
  static constexpr size_t kQueryBytes = Rows::Bytes(kRows);
  static constexpr size_t kTileBytes = Rows::Bytes(kTile);
  static constexpr size_t kSharedBytes = kQueryBytes + 4 * kTileBytes;
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  // The warps' states at the end, in the place of the tiles.
  static_assert(!kSplitTokens ||
                kWarps * kRows * (kHeadDim + 2) * 4 <= 4 * kTileBytes);
};

// The plan's arrays.
struct PlanArrays {
  const AttentionItem* items;
  const AttentionPart* parts;
  const AttentionItemRow* item_rows;
  const AttentionPartRow* part_rows;
  const std::byte* const* pages;
};

__device__ __forceinline__ PlanArrays ArraysOf(const std::byte* plan) {
  const auto* h = reinterpret_cast<const AttentionPlanHeader*>(plan);
  return {
      reinterpret_cast<const AttentionItem*>(plan + h->items),
      reinterpret_cast<const AttentionPart*>(plan + h->parts),
      reinterpret_cast<const AttentionItemRow*>(plan + h->item_rows),
      reinterpret_cast<const AttentionPartRow*>(plan + h->part_rows),
      reinterpret_cast<const std::byte* const*>(plan + h->pages),
  };
}

// Walks the tiles of an item's parts; the same in every thread.
struct TileCursor {
  int part;   // of the item
  int token;  // first of the tile
};

template <int kTile>
__device__ __forceinline__ int FirstTile(const AttentionPart& part,
                                         uint32_t window) {
  const int first = static_cast<int>(part.first_token);
  if (window == 0) return first;
  // Tokens that no row's window reaches.
  const int hidden = part.min_reach - static_cast<int>(window);
  return hidden <= first ? first : hidden / kTile * kTile;
}

// The first tile at or after `cursor`, which may lie behind its part's end.
template <int kTile>
__device__ __forceinline__ TileCursor Settle(TileCursor cursor,
                                             const AttentionPart* parts,
                                             int num_parts, uint32_t window) {
  while (cursor.part < num_parts &&
         cursor.token >= static_cast<int>(parts[cursor.part].end_token)) {
    ++cursor.part;
    if (cursor.part < num_parts) {
      cursor.token = FirstTile<kTile>(parts[cursor.part], window);
    }
  }
  return cursor;
}

// Cosine and sine of pairs 2 m and 2 m + 1 at a signed position.
struct Turn {
  float2 cosine, sine;
};
__device__ __forceinline__ Turn TurnAt(const AttentionParams& p, int position,
                                       int m, float factor) {
  const int row = position < 0 ? -position : position;
  const float* const at =
      p.rope + static_cast<size_t>(row) * 2 * p.rope_pairs + 2 * m;
  const float2 c = *reinterpret_cast<const float2*>(at);
  const float2 s = *reinterpret_cast<const float2*>(at + p.rope_pairs);
  const float sign = position < 0 ? -factor : factor;
  return {make_float2(c.x * factor, c.y * factor),
          make_float2(s.x * sign, s.y * sign)};
}

// Four elements of a head that turn together, or do not turn: unit u of
// head_dim / 4. `load(at)` and `store(at, low, high)` take even elements.
template <class Load, class Store>
__device__ __forceinline__ void TurnUnit(const AttentionParams& p, int position,
                                         int unit, float factor, Load load,
                                         Store store) {
  const int pairs = p.rope == nullptr ? 0 : static_cast<int>(p.rope_pairs);
  if (unit >= pairs / 2) {
    for (int at = 4 * unit; at < 4 * unit + 4; at += 2) {
      const float2 x = load(at);
      store(at, x.x, x.y);
    }
    return;
  }
  const Turn t = TurnAt(p, position, unit, factor);
  if (p.rope_interleaved) {
    const float2 x = load(4 * unit);
    const float2 y = load(4 * unit + 2);
    store(4 * unit, x.x * t.cosine.x - x.y * t.sine.x,
          x.y * t.cosine.x + x.x * t.sine.x);
    store(4 * unit + 2, y.x * t.cosine.y - y.y * t.sine.y,
          y.y * t.cosine.y + y.x * t.sine.y);
  } else {
    const float2 a = load(2 * unit);
    const float2 b = load(2 * unit + pairs);
    store(2 * unit, a.x * t.cosine.x - b.x * t.sine.x,
          a.y * t.cosine.y - b.y * t.sine.y);
    store(2 * unit + pairs, b.x * t.cosine.x + a.x * t.sine.x,
          b.y * t.cosine.y + a.y * t.sine.y);
  }
}

// Softmax state of a thread's two rows, g and g + 8 of its warp's 16.
template <int kHeadDim>
struct SoftmaxState {
  float maximum[2] = {kMinusInfinity, kMinusInfinity};
  float sum[2] = {0, 0};  // of this thread's columns
  float out[kHeadDim / 8][4] = {};
};

template <class T, int kHeadDim, int kRows>
struct AttentionBlock {
  using Shape = AttentionShapeOf<T, kHeadDim, kRows>;
  using Rows = typename Shape::Rows;
  static constexpr int kTile = Shape::kTile;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kColumns = Shape::kWarpTokens / 8;

  const AttentionParams& p;
  const PlanArrays plan;
  const AttentionItem item;
  const int kv_head, first_head;  // first_head: of the block's, among kv_head's
  const int heads;                // of a query row, in this block
  T* const queries;
  T* const keys;    // two tiles
  T* const values;  // two tiles

  __device__ __forceinline__ int HeadsPerKv() const {
    return static_cast<int>(p.num_heads / p.num_kv_heads);
  }
  // Of a packed row; the row may not exist.
  __device__ __forceinline__ int QueryOf(int row) const { return row / heads; }
  __device__ __forceinline__ int HeadOf(int row) const {
    return kv_head * HeadsPerKv() + first_head + row % heads;
  }
  __device__ __forceinline__ bool Exists(int row) const {
    return QueryOf(row) < static_cast<int>(item.num_rows) &&
           first_head + row % heads < HeadsPerKv();
  }

  // Begins the copies of a tile; tokens that are not there become zeros.
  __device__ __forceinline__ void Fetch(TileCursor at, int buffer) const {
    if (at.part < static_cast<int>(item.num_parts)) {
      const AttentionPart& part =
          plan.parts[item.first_part + static_cast<uint32_t>(at.part)];
      const uint32_t shift =
          static_cast<uint32_t>(__ffs(static_cast<int>(p.page_tokens))) - 1;
      const size_t head_bytes =
          static_cast<size_t>(kv_head) * p.head_stride_bytes;
      T* const k = keys + buffer * (Shape::kTileBytes / sizeof(T));
      T* const v = values + buffer * (Shape::kTileBytes / sizeof(T));
      for (int c = static_cast<int>(threadIdx.x); c < kTile * Rows::kChunks;
           c += Shape::kThreads) {
        const int token = c / Rows::kChunks;
        const int chunk = c % Rows::kChunks;
        const bool valid = at.token + token < static_cast<int>(part.end_token);
        const uint32_t place =
            part.first_slot +
            static_cast<uint32_t>(valid ? at.token + token : at.token);
        const std::byte* const from =
            plan.pages[part.first_page + (place >> shift)] + head_bytes +
            static_cast<size_t>(place & (p.page_tokens - 1)) * kHeadDim *
                sizeof(T) +
            static_cast<size_t>(chunk) * 16;
        CpAsync16(Rows::Chunk(k, token, chunk), from + p.key_offset_bytes,
                  valid);
        CpAsync16(Rows::Chunk(v, token, chunk), from + p.value_offset_bytes,
                  valid);
      }
    }
    CpAsyncCommit();
  }

  // The item's queries, turned into the part's frame, to shared memory.
  __device__ __forceinline__ void TurnQueries(const AttentionPart& part) const {
    constexpr int kUnits = kHeadDim / 4;
    for (int c = static_cast<int>(threadIdx.x); c < kRows * kUnits;
         c += Shape::kThreads) {
      const int row = c / kUnits;
      const bool exists = Exists(row);
      const int query = exists ? QueryOf(row) : 0;
      const T* const from =
          static_cast<const T*>(p.q) +
          static_cast<size_t>(
              plan.item_rows[item.first_row + static_cast<uint32_t>(query)]
                  .row) *
              p.q_stride +
          static_cast<size_t>(exists ? HeadOf(row) : 0) * kHeadDim;
      int position =
          plan.part_rows[part.first_row + static_cast<uint32_t>(query)]
              .frame_position;
      if (p.rotate_keys) position += part.position_offset;
      TurnUnit(
          p, position, c % kUnits, 1.0f,
          [&](int at) {
            const auto bits = *reinterpret_cast<const uint32_t*>(from + at);
            return exists ? UnpackPair(bits, T()) : make_float2(0, 0);
          },
          [&](int at, float low, float high) {
            *Rows::Pair(queries, row, at) = PackPair(low, high, T());
          });
    }
  }

  // Turns a tile of keys by the view's offset, in place.
  __device__ __forceinline__ void TurnKeys(const AttentionPart& part,
                                           T* tile) const {
    constexpr int kUnits = kHeadDim / 4;
    for (int c = static_cast<int>(threadIdx.x); c < kTile * kUnits;
         c += Shape::kThreads) {
      const int token = c / kUnits;
      TurnUnit(
          p, part.position_offset, c % kUnits, 1.0f / p.rope_factor,
          [&](int at) { return UnpackPair(*Rows::Pair(tile, token, at), T()); },
          [&](int at, float low, float high) {
            *Rows::Pair(tile, token, at) = PackPair(low, high, T());
          });
    }
  }

  // This warp's 16 rows of the turned queries, as operands.
  __device__ __forceinline__ void LoadQueries(int step,
                                              uint32_t (&out)[4]) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    LoadMatrix(out, Rows::Chunk(queries, FirstRow() + lane % 16,
                                2 * step + lane / 16));
  }
  __device__ __forceinline__ static int Warp() {
    return static_cast<int>(threadIdx.x) >> 5;
  }
  __device__ __forceinline__ static int FirstRow() {
    return Shape::kSplitTokens ? 0 : 16 * Warp();
  }
  // Of the tile, that this warp computes.
  __device__ __forceinline__ static int FirstToken() {
    return Shape::kSplitTokens ? 16 * Warp() : 0;
  }
};

}  // namespace promptcache::gpu
