#include "tools/bench/kernels/peak_inl.h"

namespace promptcache::bench {
namespace {

typedef float F __attribute__((vector_size(16)));

uint64_t Fp32(uint64_t rounds) {
  const F one = {1e-3f, 1e-3f, 1e-3f, 1e-3f};
  return RunChains(rounds, one, 8, [](F sum, F x) { return x * sum + x; });
}

}  // namespace

PeakLoop PortablePeak() { return {.fp32 = Fp32}; }

}  // namespace promptcache::bench
