#pragma once

// AVX2 with FMA and F16C: eight lanes, bf16 widened in registers. Included by
// one file an instruction set; the type has internal linkage.

#include <immintrin.h>

#include <cstdint>

#include "inference_worker/cpu/elementwise_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct Avx2 {
  static constexpr uint32_t kLanes = 8;
  static constexpr uint32_t kTileRows = 6;
  static constexpr bool kPrepareRows = false;
  static constexpr int kSumRegisters = 12;
  static constexpr int kAttentionVectors = 2;
  static constexpr int kAttentionRows = 6;
  using F = __m256;
  using Pairs = __m256i;

  static F Zero() { return _mm256_setzero_ps(); }
  static F Set1(float x) { return _mm256_set1_ps(x); }
  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static float SqrtScalar(float x) {
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
  }

  static F Round(F x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // |n| <= 126.
  static F ScaleByPowerOf2(F p, F n) {
    const __m256i exponent = _mm256_cvtps_epi32(n);
    const __m256i bits = _mm256_slli_epi32(
        _mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(bits));
  }
  static float ReduceAdd(F v) {
    __m128 x =
        _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float ReduceMax(F v) {
    __m128 x =
        _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static F KeepFirst(F v, uint32_t count, F other) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep = _mm256_cmpgt_epi32(
        _mm256_set1_epi32(static_cast<int32_t>(count)), index);
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(keep));
  }

  // Of the elements of a and b, one after another: those with even indices to
  // a, the others to b.
  static void Deinterleave(F* a, F* b) {
    const F even = _mm256_shuffle_ps(*a, *b, 0x88);
    const F odd = _mm256_shuffle_ps(*a, *b, 0xdd);
    *a = SwapMiddle(even);
    *b = SwapMiddle(odd);
  }
  // Undoes it.
  static void Interleave(F* a, F* b) {
    const F low = _mm256_unpacklo_ps(*a, *b);
    const F high = _mm256_unpackhi_ps(*a, *b);
    *a = _mm256_permute2f128_ps(low, high, 0x20);
    *b = _mm256_permute2f128_ps(low, high, 0x31);
  }

  static Pairs LoadPairs(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static F Low(Pairs v) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  }
  static F High(Pairs v) {
    return _mm256_castsi256_ps(_mm256_and_si256(
        v, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }
  static F LoadBf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return Low(_mm256_cvtepu16_epi32(half));
  }
  // columns[j] lane i = the 32 bits at rows[i][offset + 2 j]; all eight.
  static void TransposePairs(const uint16_t* const* rows, uint32_t offset,
                             uint32_t, Pairs* columns) {
    __m256 low[4];
    __m256 high[4];
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      low[i] = JoinHalves(rows[i] + offset, rows[i + 4] + offset);
      high[i] = JoinHalves(rows[i] + offset + 8, rows[i + 4] + offset + 8);
    }
    Transpose4(low, columns);
    Transpose4(high, columns + 4);
  }

 private:
  // Quarters 0, 2, 1, 3.
  static F SwapMiddle(F v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
  }
  static __m256 JoinHalves(const uint16_t* a, const uint16_t* b) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    return _mm256_castsi256_ps(
        _mm256_inserti128_si256(_mm256_castsi128_si256(x), y, 1));
  }
  static void Transpose4(const __m256* in, Pairs* out) {
    const __m256 a = _mm256_unpacklo_ps(in[0], in[1]);
    const __m256 b = _mm256_unpackhi_ps(in[0], in[1]);
    const __m256 c = _mm256_unpacklo_ps(in[2], in[3]);
    const __m256 d = _mm256_unpackhi_ps(in[2], in[3]);
    out[0] = _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0x44));
    out[1] = _mm256_castps_si256(_mm256_shuffle_ps(a, c, 0xee));
    out[2] = _mm256_castps_si256(_mm256_shuffle_ps(b, d, 0x44));
    out[3] = _mm256_castps_si256(_mm256_shuffle_ps(b, d, 0xee));
  }
};

}  // namespace
}  // namespace promptcache::worker::cpu
