#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace promptcache {

// 64-bit sum of one page, for finding flipped or misplaced bytes, not for
// security. The worker that wrote a page sends its sum with the commit; the
// daemon checks it whenever the page moves, workers check some of what they
// are given. Position-keyed multiply-add over the page's little-endian 64-bit
// words w_i, modulo 2^64:
//
//   sum = Σ_i (w_i ^ kPageSumSeed) * k_i,   k_i = Mix(i) | 1
//
// with Mix the splitmix64 finaliser. Every k_i is odd, so changing one word
// always changes the sum; the order of the additions does not matter, so CPU
// lanes and CUDA threads may add in any order. Slots of a page's unused tokens
// count too: writers zero them.
//
// REQUIRES: page.size() is a multiple of 8.
uint64_t PageSum(std::span<const std::byte> page);

}  // namespace promptcache
