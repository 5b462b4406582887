#pragma once

#include <cstdint>

#include "tools/bench/kernels/floor.h"

namespace promptcache::bench {

// 16 independent chains hide the latency of any of the processors known.
template <class V, class Step>
uint64_t RunChains(uint64_t rounds, V one, uint64_t ops_per_step, Step step) {
  V sums[16];
#pragma GCC unroll 32
  for (int i = 0; i < 16; ++i) sums[i] = one;
  for (uint64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < 16; ++i) {
      sums[i] = step(sums[i], one);
      // Says that the sum may have become anything: else the compiler sees
      // that all chains are the same one.
#if defined(__x86_64__)
      asm volatile("" : "+x"(sums[i]));
#elif defined(__aarch64__)
      asm volatile("" : "+w"(sums[i]));
#endif
    }
  }
  return rounds * 16 * ops_per_step;
}

}  // namespace promptcache::bench
