#include "tools/bench/kernels/floor.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "tools/bench/kernels/peak_inl.h"

namespace promptcache::bench {
namespace {

uint64_t Fp32(uint64_t rounds) {
  return RunChains(rounds, _mm256_set1_ps(1e-3f), 16, [](__m256 sum, __m256 x) {
    return _mm256_fmadd_ps(x, sum, x);
  });
}

}  // namespace

PeakLoop Avx2Peak() { return {.fp32 = Fp32}; }

}  // namespace promptcache::bench
#else
namespace promptcache::bench {
PeakLoop Avx2Peak() { return {}; }
}  // namespace promptcache::bench
#endif
