// AVX2 with FMA and F16C: vpmaddubsw over eight columns at a time.

#include "inference_worker/cpu/quant_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "inference_worker/cpu/quant_gemm_inl.h"
#include "inference_worker/cpu/simd_avx2_inl.h"

namespace promptcache::worker::cpu {
namespace {

struct Avx2Quant : Avx2 {
  static constexpr uint32_t kTileRows = 6;
  static constexpr int kQuantSums = 6;
  // Of nibbles 16-bit sums of a whole block: 16 products of at most 15 * 127
  // are below 2^15. Of bytes 32-bit sums.
  using Sum = __m256i;
  struct Bytes {
    __m256i magnitudes;
    __m256i signs;
  };

  static F Set1At(const std::byte* p) {
    float x;
    std::memcpy(&x, p, sizeof(x));
    return _mm256_set1_ps(x);
  }
  static __m256i Set1Ints(const std::byte* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof(x));
    return _mm256_set1_epi32(x);
  }
  static __m256i LoadInts(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static F LoadHalf(const std::byte* p) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static __m256i LowNibbles(const std::byte* p) {
    return _mm256_and_si256(LoadInts(p), _mm256_set1_epi8(15));
  }
  static __m256i HighNibbles(const std::byte* p) {
    return _mm256_and_si256(_mm256_srli_epi16(LoadInts(p), 4),
                            _mm256_set1_epi8(15));
  }
  // Signed bytes as magnitudes: 2 * 128 * 127 is below 2^15, which vpmaddubsw
  // saturates at.
  static Bytes LoadBytes(const std::byte* p) {
    const __m256i codes = _mm256_xor_si256(
        LoadInts(p), _mm256_set1_epi8(static_cast<char>(0x80)));
    return {_mm256_abs_epi8(codes), codes};
  }

  template <QuantFormat kFormat>
  static Sum Start(const std::byte*) {
    return _mm256_setzero_si256();
  }
  static Sum StepNibbles(Sum sum, __m256i codes, const std::byte* x) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, Set1Ints(x)));
  }
  static Sum StepBytes(Sum sum, const Bytes& codes, const std::byte* x) {
    const __m256i products = _mm256_maddubs_epi16(
        codes.magnitudes, _mm256_sign_epi8(Set1Ints(x), codes.signs));
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  template <QuantFormat kFormat>
  static F Finish(Sum sum, const std::byte* correction) {
    if constexpr (HasNibbles(kFormat)) {
      sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    }
    if constexpr (kFormat == QuantFormat::kNibbles) {
      sum = _mm256_add_epi32(sum, Set1Ints(correction));
    }
    return _mm256_cvtepi32_ps(sum);
  }

  static void Quantize(const float* x, int8_t* codes, float* scale,
                       int32_t* sum) {
    __m256 values[4];
    __m256i magnitudes = _mm256_setzero_si256();
    // Magnitudes compare as integers; a NaN is above all of them.
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      values[i] = _mm256_loadu_ps(x + 8 * i);
      magnitudes = _mm256_max_epi32(
          magnitudes, _mm256_and_si256(_mm256_castps_si256(values[i]), mask));
    }
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(magnitudes),
                              _mm256_extracti128_si256(magnitudes, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    const int32_t bits = _mm_cvtsi128_si32(m);
    if (bits < kTinyBits) return QuantizeZeros(codes, scale, sum);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    *scale = largest / 127.0f;
    const __m256 inverse = _mm256_set1_ps(127.0f / largest);
    __m256i rounded[4];
    PROMPTCACHE_UNROLL
    for (int i = 0; i < 4; ++i) {
      rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
    }
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                           _mm256_packs_epi32(rounded[2], rounded[3]));
    const __m256i packed = _mm256_permutevar8x32_epi32(
        mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), packed);
    const __m256i sums =
        _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed),
                          _mm256_set1_epi16(1));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums),
                              _mm256_extracti128_si256(sums, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    *sum = _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
};

constexpr QuantKernels kKernels = MakeQuantKernels<Avx2Quant>("avx2", 48);

}  // namespace

const QuantKernels* Avx2QuantKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const QuantKernels* Avx2QuantKernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
