#pragma once

// AVX-512 with VNNI: vpdpbusd over sixteen columns at a time, for
// QuantGemm<Avx512Vnni> and QuantRows<Avx512Vnni>.

#include "inference_worker/cpu/quant_gemm_inl.h"
#include "inference_worker/cpu/simd_avx512_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct Avx512Vnni : Avx512 {
  static constexpr uint32_t kTileRows = 12;
  static constexpr int kQuantSums = 12;
  using Sum = __m512i;

  static F Set1At(const std::byte* p) {
    float x;
    std::memcpy(&x, p, sizeof(x));
    return _mm512_set1_ps(x);
  }
  static __m512i Set1Ints(const std::byte* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi32(x);
  }
  static F LoadHalf(const std::byte* p) {
    return _mm512_cvtph_ps(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static __m512i LoadBytes(const std::byte* p) { return _mm512_loadu_si512(p); }
  static __m512i LowNibbles(const std::byte* p) {
    return _mm512_and_si512(LoadBytes(p), _mm512_set1_epi8(15));
  }
  static __m512i HighNibbles(const std::byte* p) {
    return _mm512_and_si512(_mm512_srli_epi16(LoadBytes(p), 4),
                            _mm512_set1_epi8(15));
  }

  // The correction of the zero code begins the sum.
  template <QuantFormat kFormat>
  static Sum Start(const std::byte* correction) {
    return HasMinimum(kFormat) ? _mm512_setzero_si512() : Set1Ints(correction);
  }
  static Sum StepNibbles(Sum sum, __m512i codes, const std::byte* x) {
    return _mm512_dpbusd_epi32(sum, codes, Set1Ints(x));
  }
  static Sum StepBytes(Sum sum, __m512i codes, const std::byte* x) {
    return _mm512_dpbusd_epi32(sum, codes, Set1Ints(x));
  }
  template <QuantFormat kFormat>
  static F Finish(Sum sum, const std::byte*) {
    return _mm512_cvtepi32_ps(sum);
  }

  static void Quantize(const float* x, int8_t* codes, float* scale,
                       int32_t* sum) {
    const __m512 low = _mm512_loadu_ps(x);
    const __m512 high = _mm512_loadu_ps(x + 16);
    // Magnitudes compare as integers; a NaN is above all of them.
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const int32_t bits = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), mask),
                         _mm512_and_si512(_mm512_castps_si512(high), mask)));
    if (bits < kTinyBits) return QuantizeZeros(codes, scale, sum);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    *scale = largest / 127.0f;
    const __m512 inverse = _mm512_set1_ps(127.0f / largest);
    const __m256i packed = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm512_cvtsepi32_epi8(
            _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)))),
        _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse))),
        1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), packed);
    const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(),
                                             _mm256_set1_epi8(1), packed);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums),
                              _mm256_extracti128_si256(sums, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    *sum = _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
};

}  // namespace
}  // namespace promptcache::worker::cpu
