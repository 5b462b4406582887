#include "common/page_sum.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "glog/logging.h"

namespace promptcache {
namespace {

constexpr uint64_t kPageSumSeed = 0x9e3779b97f4a7c15ULL;
// Words whose keys are kept (512 KiB, made once): without them three more
// multiplications a word bound the speed. Pages are smaller as a rule.
constexpr size_t kKeptKeys = size_t{1} << 16;

inline uint64_t WordKey(uint64_t i) {
  uint64_t z = (i + 1) * kPageSumSeed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return (z ^ (z >> 31)) | 1;
}

const uint64_t* KeptKeys() {
  static const std::vector<uint64_t> keys = [] {
    std::vector<uint64_t> made(kKeptKeys);
    for (size_t i = 0; i < made.size(); ++i) made[i] = WordKey(i);
    return made;
  }();
  return keys.data();
}

inline uint64_t Term(const std::byte* words, size_t i, uint64_t key) {
  uint64_t word;
  std::memcpy(&word, words + i * sizeof(word), sizeof(word));
  return (word ^ kPageSumSeed) * key;
}

}  // namespace

uint64_t PageSum(std::span<const std::byte> page) {
  CHECK_EQ(page.size() % sizeof(uint64_t), 0u);
  const size_t num_words = page.size() / sizeof(uint64_t);
  const size_t kept = std::min(num_words, kKeptKeys);
  const std::byte* const words = page.data();
  const uint64_t* const keys = KeptKeys();
  uint64_t sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= kept; i += 4) {
    sums[0] += Term(words, i, keys[i]);
    sums[1] += Term(words, i + 1, keys[i + 1]);
    sums[2] += Term(words, i + 2, keys[i + 2]);
    sums[3] += Term(words, i + 3, keys[i + 3]);
  }
  uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
  for (; i < kept; ++i) sum += Term(words, i, keys[i]);
  for (; i < num_words; ++i) sum += Term(words, i, WordKey(i));
  return sum;
}

}  // namespace promptcache
