#pragma once

// The products of attention by AMX tiles, for Attention<Simd, AmxProducts>.
// Rotated queries and softmax weights are split into two bf16 each, high and
// low: x = high + low to 2^-17, so that nothing is lost but what fp32 loses
// anyway (keys and values are bf16 as they lie). Twice the multiplications,
// still several times faster than fp32 vectors.

#include "inference_worker/cpu/simd_avx512_inl.h"

namespace promptcache::worker::cpu {
namespace {

class AmxProducts {
 public:
  static constexpr bool kUsed = true;
  // Packed rows that are multiplied at a time.
  static constexpr uint32_t kRows = 16;

  // GCC 12 does not know that the tile instructions read memory: stores before
  // this one stay before them.
  static void FinishStores() { asm volatile("" ::: "memory"); }

  // Eight tiles of 16 rows of 64 bytes, until Release.
  static void Configure() {
    // A constant: stores to a local one could be dropped (see above).
    alignas(64) static constexpr uint8_t kConfig[64] = {
        // palette 1; bytes of a row, 16 bits each, from 16; rows from 48
        1,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,
        64, 0,  64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0,
        0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,
        16, 16, 16, 16, 16, 16, 16, 16, 0,  0, 0,  0, 0,  0, 0,  0};
    FinishStores();
    _tile_loadconfig(kConfig);
  }
  static void Release() { _tile_release(); }

  AmxProducts(const AttentionTask& task, float* scratch)
      : dim_(task.head_dim),
        dim_groups_((task.head_dim + 31) / 32),
        logits_(scratch),
        sums_(logits_ + kRows * kTileTokens),
        keys_(reinterpret_cast<uint16_t*>(sums_ + kRows * kMaxHeadDim)),
        values_(keys_ + kTileTokens * kMaxHeadDim),
        queries_(values_ + kTileTokens * kMaxHeadDim),
        weights_(queries_ + 2 * kMaxPackedRows * kMaxHeadDim) {}

  // Splits the rotated queries [num_rows][head_dim].
  void SetQueries(const float* queries, uint32_t num_rows) {
    for (uint32_t row = 0; row < num_rows; ++row) {
      uint16_t* const high = QueryRow(row);
      uint16_t* const low = high + dim_groups_ * kTileElements;
      const float* const query = queries + row * size_t{dim_};
      for (uint32_t g = 0; g < dim_groups_; ++g) {
        const bool half = dim_ - g * kGroup < kGroup;
        const __m512 a = _mm512_loadu_ps(query + g * kGroup);
        const __m512 b = half ? _mm512_setzero_ps()
                              : _mm512_loadu_ps(query + g * kGroup + 16);
        Split(a, b, high + g * kTileElements, low + g * kTileElements);
      }
    }
  }

  // Whether SetRotatedQueries can: all of a head is turned, element i with
  // i + head_dim / 2, and either half is whole groups.
  static bool Rotates(const RopeView& rope, uint32_t head_dim) {
    return rope.table != nullptr && !rope.interleaved &&
           2 * rope.num_pairs == head_dim && rope.num_pairs % kGroup == 0;
  }

  // Rotates and splits the queries [num_heads][head_dim] of one token, which
  // are rows `row` and on. Every view that stands elsewhere wants it anew: what
  // is rotated does not go through memory. Unlike Elementwise::Rotate it fuses
  // multiply-adds: for a given row and tile it is always the one or the other.
  template <class Turn>
  void SetRotatedQueries(const Turn& turn, const float* queries, uint32_t row,
                         uint32_t num_heads) {
    // What stores could change is read once, before them.
    const uint32_t pairs = turn.pairs;
    const size_t dim = dim_;
    const size_t to_next_tile = QueryTileElements() - kTileElements;
    const __m512 cosine_scale = _mm512_set1_ps(turn.cosine_scale);
    const __m512 sine_scale = _mm512_set1_ps(turn.sine_scale);
    const size_t to_low = dim_groups_ * kTileElements;
    const size_t to_second = dim_groups_ / 2 * kTileElements;
    for (uint32_t i = 0; i < pairs; i += kGroup) {
      __m512 c[2];
      __m512 s[2];
      PROMPTCACHE_UNROLL
      for (uint32_t j = 0; j < 2; ++j) {
        const uint32_t at = i + 16 * j;
        c[j] = _mm512_mul_ps(_mm512_loadu_ps(turn.cosines + at), cosine_scale);
        s[j] = _mm512_mul_ps(_mm512_loadu_ps(turn.sines + at), sine_scale);
      }
      const float* query = queries + i;
      uint16_t* to = QueryRow(row) + i / kGroup * kTileElements;
      for (uint32_t r = row; r < row + num_heads; ++r) {
        __m512 first[2];
        __m512 second[2];
        PROMPTCACHE_UNROLL
        for (uint32_t j = 0; j < 2; ++j) {
          const __m512 a = _mm512_loadu_ps(query + 16 * j);
          const __m512 b = _mm512_loadu_ps(query + pairs + 16 * j);
          first[j] = _mm512_fmsub_ps(a, c[j], _mm512_mul_ps(b, s[j]));
          second[j] = _mm512_fmadd_ps(b, c[j], _mm512_mul_ps(a, s[j]));
        }
        Split(first[0], first[1], to, to + to_low);
        Split(second[0], second[1], to + to_second, to + to_second + to_low);
        query += dim;
        to += kGroup;
        if ((r + 1) % kRows == 0) to += to_next_tile;
      }
    }
  }

  // Keys to [dim / 2][token][2], values to [token / 2][dim][2]; what is
  // missing to a whole tile is zero.
  void SetTile(const AttentionTask& task, const std::byte* const* rows,
               uint32_t tokens) {
    SetKeys(task.key_offset, rows, tokens);
    SetValues(task.value_offset, rows, tokens);
  }

  // Logits of the kRows rows of `row_tile`: [kRows][kTileTokens].
  float* Logits(uint32_t row_tile) {
    const uint16_t* high = queries_ + row_tile * QueryTileElements();
    const uint16_t* low = high + dim_groups_ * kTileElements;
    const uint16_t* keys = keys_;
    constexpr size_t kKeyBytes = kTileTokens * 4;
    FinishStores();
    ZeroSums();
    for (uint32_t g = 0; g < dim_groups_; ++g) {
      _tile_loadd(4, high, kGroup * 2);
      _tile_loadd(5, low, kGroup * 2);
      _tile_loadd(6, keys, kKeyBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + 32, kKeyBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(6, keys + 64, kKeyBytes);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(7, keys + 96, kKeyBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      high += kTileElements;
      low += kTileElements;
      keys += 16 * kTileTokens * 2;
    }
    StoreSums(logits_, kTileTokens);
    return logits_;
  }

  // Splits the softmax weights that row `row` of the tile has in Logits' place;
  // those from `tokens` on are zero.
  void SetWeights(uint32_t row, uint32_t tokens) {
    float* const weights = logits_ + row * kTileTokens;
    for (uint32_t g = 0; g < 2; ++g) {
      __m512 parts[2];
      PROMPTCACHE_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t first = g * 32 + i * 16;
        const uint32_t left = tokens > first ? tokens - first : 0;
        const __mmask16 mask =
            static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1);
        parts[i] = _mm512_maskz_loadu_ps(mask, weights + first);
      }
      uint16_t* const high = weights_ + g * kTileElements + row * kGroup;
      Split(parts[0], parts[1], high, high + 2 * kTileElements);
    }
  }

  // Weighted values of the rows: [kRows][head_dim].
  const float* Sums(uint32_t tokens) {
    FinishStores();
    const uint32_t token_groups = tokens > kGroup ? 2 : 1;
    const uint32_t dim_tiles = dim_ / 16;
    uint32_t tile = 0;
    for (; tile + 4 <= dim_tiles; tile += 4) FourSums(tile, token_groups);
    for (; tile < dim_tiles; ++tile) OneSum(tile, token_groups);
    return sums_;
  }

 private:
  static constexpr size_t kGroup = 32;
  static constexpr size_t kTileElements = kRows * kGroup;

  size_t QueryTileElements() const { return 2 * dim_groups_ * kTileElements; }
  // The first group of a row's high halves.
  uint16_t* QueryRow(uint32_t row) const {
    return queries_ + row / kRows * QueryTileElements() + row % kRows * kGroup;
  }

  // The upper 16 bits are x rounded to bf16, ties away from zero. Cutting off
  // instead would save an addition and leave 2^-16.
  static __m512i RoundUpper(__m512 x) {
    return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  }

  // Exact. Queries and weights are finite; what is not, or rounds to infinity,
  // comes as a low half that is not finite either, whatever the addition has
  // made of the high one: NaN stays NaN.
  static __m512 Rest(__m512 x, __m512i rounded) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm512_sub_ps(x,
                         _mm512_castsi512_ps(_mm512_and_si512(rounded, upper)));
  }

  // High halves by integers: vcvtneps2bf16 is three instructions inside, two of
  // them for the port that shuffles, and what it gives has to be widened again.
  static void Split(__m512 a, __m512 b, uint16_t* high, uint16_t* low) {
    alignas(64) static constexpr uint16_t kUpperHalves[32] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i rounded_a = RoundUpper(a);
    const __m512i rounded_b = RoundUpper(b);
    const __m512i halves = _mm512_permutex2var_epi16(
        rounded_a, _mm512_loadu_si512(kUpperHalves), rounded_b);
    _mm512_storeu_si512(high, halves);
    const __m512bh rest =
        _mm512_cvtne2ps_pbh(Rest(b, rounded_b), Rest(a, rounded_a));
    std::memcpy(low, &rest, sizeof(rest));
  }

  void SetKeys(size_t key_offset, const std::byte* const* rows,
               uint32_t tokens) {
    alignas(64) static constexpr uint16_t kNoKey[kMaxHeadDim] = {};
    const uint32_t dim_pairs = dim_ / 2;
    for (uint32_t t = 0; t < kTileTokens; t += 16) {
      const uint16_t* keys[16];
      for (uint32_t j = 0; j < 16; ++j) {
        keys[j] =
            t + j < tokens
                ? reinterpret_cast<const uint16_t*>(rows[t + j] + key_offset)
                : kNoKey;
      }
      for (uint32_t pair = 0; pair < dim_pairs; pair += 16) {
        const uint32_t left = dim_pairs - pair;
        __m512i columns[16];
        // Columns beyond head_dim come as zeros.
        Avx512::TransposePairs(keys, 2 * pair, left < 16 ? left : 16, columns);
        PROMPTCACHE_UNROLL
        for (uint32_t j = 0; j < 16; ++j) {
          _mm512_storeu_si512(keys_ + ((pair + j) * kTileTokens + t) * 2,
                              columns[j]);
        }
      }
    }
  }

  static __m512i LoadValues(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  void SetValues(size_t value_offset, const std::byte* const* rows,
                 uint32_t tokens) {
    alignas(64) static constexpr uint16_t kNoValue[kMaxHeadDim] = {};
    const uint32_t whole = tokens > kGroup ? kTileTokens : kGroup;
    for (uint32_t t = 0; t < whole; t += 2) {
      const uint16_t* pair[2];
      for (uint32_t i = 0; i < 2; ++i) {
        pair[i] =
            t + i < tokens
                ? reinterpret_cast<const uint16_t*>(rows[t + i] + value_offset)
                : kNoValue;
      }
      uint16_t* const out = values_ + t * dim_;
      for (uint32_t d = 0; d < dim_; d += 16) {
        const __m512i high = _mm512_slli_epi32(LoadValues(pair[1] + d), 16);
        _mm512_storeu_si512(out + 2 * d,
                            _mm512_or_si512(LoadValues(pair[0] + d), high));
      }
    }
  }

  static void ZeroSums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void StoreSums(float* out, size_t stride) {
    _tile_stored(0, out, stride * sizeof(float));
    _tile_stored(1, out + 16, stride * sizeof(float));
    _tile_stored(2, out + 32, stride * sizeof(float));
    _tile_stored(3, out + 48, stride * sizeof(float));
  }

  void FourSums(uint32_t tile, uint32_t token_groups) {
    ZeroSums();
    const size_t value_bytes = dim_ * size_t{4};
    const uint16_t* values = values_ + tile * 32;
    for (uint32_t g = 0; g < token_groups; ++g) {
      const uint16_t* const high = weights_ + g * kTileElements;
      _tile_loadd(4, high, kGroup * 2);
      _tile_loadd(5, high + 2 * kTileElements, kGroup * 2);
      _tile_loadd(6, values, value_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + 32, value_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(6, values + 64, value_bytes);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(7, values + 96, value_bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      values += kGroup * dim_;
    }
    StoreSums(sums_ + tile * 16, dim_);
  }

  void OneSum(uint32_t tile, uint32_t token_groups) {
    _tile_zero(0);
    const uint16_t* values = values_ + tile * 32;
    for (uint32_t g = 0; g < token_groups; ++g) {
      const uint16_t* const high = weights_ + g * kTileElements;
      _tile_loadd(4, high, kGroup * 2);
      _tile_loadd(5, high + 2 * kTileElements, kGroup * 2);
      _tile_loadd(6, values, dim_ * size_t{4});
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(0, 5, 6);
      values += kGroup * dim_;
    }
    _tile_stored(0, sums_ + tile * 16, dim_ * sizeof(float));
  }

  const uint32_t dim_;
  const uint32_t dim_groups_;  // of 32
  float* const logits_;        // [kRows][kTileTokens]
  float* const sums_;          // [kRows][head_dim]
  uint16_t* const keys_;
  uint16_t* const values_;
  uint16_t* const queries_;  // [row tile][high | low][dim / 32][kRows][32]
  uint16_t* const weights_;  // [high | low][token / 32][kRows][32]
};

}  // namespace
}  // namespace promptcache::worker::cpu
