#include "tools/bench/kernels/floor.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace promptcache::bench {
namespace {

// Eight tiles of 16 rows of 64 bytes. A constant: GCC 12 does not know that all
// of it is read.
alignas(64) constexpr uint8_t kConfig[64] = {
    1,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,
    64, 0,  64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0,
    0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0,
    16, 16, 16, 16, 16, 16, 16, 16, 0,  0, 0,  0, 0,  0, 0,  0};

// Six independent tiles of sums, 16 x 16 x 32 multiply-adds each.
uint64_t Bf16(uint64_t rounds) {
  _tile_loadconfig(kConfig);
  _tile_zero(6);
  _tile_zero(7);
  for (uint64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
  return rounds * 6 * 16 * 16 * 32 * 2;
}

#if defined(__AMX_INT8__)
// The same of bytes: 64 deep.
uint64_t Int8(uint64_t rounds) {
  _tile_loadconfig(kConfig);
  _tile_zero(6);
  _tile_zero(7);
  for (uint64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 6, 7);
    _tile_dpbssd(1, 6, 7);
    _tile_dpbssd(2, 6, 7);
    _tile_dpbssd(3, 6, 7);
    _tile_dpbssd(4, 6, 7);
    _tile_dpbssd(5, 6, 7);
  }
  _tile_release();
  return rounds * 6 * 16 * 16 * 64 * 2;
}
#else
constexpr uint64_t (*Int8)(uint64_t) = nullptr;
#endif

}  // namespace

PeakLoop AmxPeak() { return {.bf16 = Bf16, .int8 = Int8}; }

}  // namespace promptcache::bench
#else
namespace promptcache::bench {
PeakLoop AmxPeak() { return {}; }
}  // namespace promptcache::bench
#endif
