#include "common/page_sum.h"

#include <cstring>

#include "glog/logging.h"

namespace promptcache {
namespace {

constexpr uint64_t kPageSumSeed = 0x9e3779b97f4a7c15ULL;

inline uint64_t WordKey(uint64_t i) {
  uint64_t z = (i + 1) * kPageSumSeed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return (z ^ (z >> 31)) | 1;
}

}  // namespace

uint64_t PageSum(std::span<const std::byte> page) {
  CHECK_EQ(page.size() % sizeof(uint64_t), 0u);
  const size_t num_words = page.size() / sizeof(uint64_t);
  uint64_t sum = 0;
  for (size_t i = 0; i < num_words; ++i) {
    uint64_t word;
    std::memcpy(&word, page.data() + i * sizeof(word), sizeof(word));
    sum += (word ^ kPageSumSeed) * WordKey(i);
  }
  return sum;
}

}  // namespace promptcache
