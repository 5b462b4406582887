#include "tools/bench/kernels/floor.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <cstring>

#include "tools/bench/kernels/peak_inl.h"

namespace promptcache::bench {
namespace {

uint64_t Fp32(uint64_t rounds) {
  return RunChains(rounds, _mm512_set1_ps(1e-3f), 32, [](__m512 sum, __m512 x) {
    return _mm512_fmadd_ps(x, sum, x);
  });
}

uint64_t Bf16(uint64_t rounds) {
  const __m512i ones = _mm512_set1_epi32(0x3a833a83);
  __m512bh x;
  std::memcpy(&x, &ones, sizeof(x));
  return RunChains(rounds, _mm512_set1_ps(1e-3f), 64, [x](__m512 sum, __m512) {
    return _mm512_dpbf16_ps(sum, x, x);
  });
}

}  // namespace

PeakLoop Avx512Bf16Peak() { return {.fp32 = Fp32, .bf16 = Bf16}; }

}  // namespace promptcache::bench
#else
namespace promptcache::bench {
PeakLoop Avx512Bf16Peak() { return {}; }
}  // namespace promptcache::bench
#endif
