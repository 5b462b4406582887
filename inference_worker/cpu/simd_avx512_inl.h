#pragma once

// AVX-512 (F, BW, VL, DQ): sixteen lanes. Included by one file an instruction
// set; the type has internal linkage.

#include <immintrin.h>

#include <cstdint>

#include "inference_worker/cpu/elementwise_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct Avx512 {
  static constexpr uint32_t kLanes = 16;
  static constexpr uint32_t kTileRows = 12;
  static constexpr bool kPrepareRows = true;
  static constexpr int kSumRegisters = 24;
  static constexpr int kAttentionVectors = 4;
  static constexpr int kAttentionRows = 6;
  using F = __m512;
  using Pairs = __m512i;

  static F Zero() { return _mm512_setzero_ps(); }
  static F Set1(float x) { return _mm512_set1_ps(x); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static float SqrtScalar(float x) {
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
  }

  static F Round(F x) {
    return _mm512_roundscale_ps(x,
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F ScaleByPowerOf2(F p, F n) { return _mm512_scalef_ps(p, n); }
  static float ReduceAdd(F v) {
    const __m256 x =
        _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 y =
        _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static float ReduceMax(F v) {
    const __m256 x =
        _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 y =
        _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static F KeepFirst(F v, uint32_t count, F other) {
    const auto keep = static_cast<__mmask16>((1u << count) - 1);
    return _mm512_mask_blend_ps(keep, other, v);
  }

  // Of the elements of a and b, one after another: those with even indices to
  // a, the others to b.
  static void Deinterleave(F* a, F* b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18,
                                           20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const F first = _mm512_permutex2var_ps(*a, even, *b);
    *b = _mm512_permutex2var_ps(*a, odd, *b);
    *a = first;
  }
  // Undoes it.
  static void Interleave(F* a, F* b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5,
                                          21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const F first = _mm512_permutex2var_ps(*a, low, *b);
    *b = _mm512_permutex2var_ps(*a, high, *b);
    *a = first;
  }

  static Pairs LoadPairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static F Low(Pairs v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  }
  static F High(Pairs v) {
    return _mm512_castsi512_ps(_mm512_and_si512(
        v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }
  static F LoadBf16(const uint16_t* p) {
    const __m256i half =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return Low(_mm512_cvtepu16_epi32(half));
  }
  // columns[j] lane i = the 32 bits at rows[i][offset + 2 j], j < count.
  static void TransposePairs(const uint16_t* const* rows, uint32_t offset,
                             uint32_t count, Pairs* columns) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    __m512i a[16];
    __m512i b[16];
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 16; ++i) {
      a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + offset);
    }
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 g + c] holds, in 128-bit part q, column 4 q + c of rows 4 g..4 g + 3.
    PROMPTCACHE_UNROLL
    for (int c = 0; c < 4; ++c) {
      const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
      const __m512i high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
      const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
      const __m512i high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
      columns[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
      columns[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
      columns[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
      columns[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
  }
};

}  // namespace
}  // namespace promptcache::worker::cpu
