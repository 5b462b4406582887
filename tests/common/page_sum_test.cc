#include "common/page_sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace promptcache {
namespace {

std::vector<std::byte> Page(size_t num_bytes) {
  std::vector<std::byte> page(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) {
    page[i] = static_cast<std::byte>(i * 31 + 7);
  }
  return page;
}

TEST(PageSumTest, EveryFlippedBitChangesTheSum) {
  std::vector<std::byte> page = Page(512);
  const uint64_t sum = PageSum(page);
  for (size_t bit = 0; bit < page.size() * 8; ++bit) {
    page[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(PageSum(page), sum) << "bit " << bit;
    page[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_EQ(PageSum(page), sum);
}

TEST(PageSumTest, SwappedWordsChangeTheSum) {
  std::vector<std::byte> page = Page(512);
  std::vector<std::byte> swapped = page;
  std::memcpy(swapped.data(), page.data() + 64, 8);
  std::memcpy(swapped.data() + 64, page.data(), 8);
  EXPECT_NE(PageSum(page), PageSum(swapped));
}

TEST(PageSumTest, ZerosOfDifferentLengthsDiffer) {
  EXPECT_NE(PageSum(std::vector<std::byte>(64)),
            PageSum(std::vector<std::byte>(128)));
}

// The definition, word by word.
uint64_t SumByDefinition(std::span<const std::byte> page) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < page.size() / 8; ++i) {
    uint64_t z = (i + 1) * kGolden;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z = (z ^ (z >> 31)) | 1;
    uint64_t word;
    std::memcpy(&word, page.data() + 8 * i, 8);
    sum += (word ^ kGolden) * z;
  }
  return sum;
}

TEST(PageSumTest, FollowsTheDefinitionForEveryLength) {
  // Beyond 64 Ki words keys are not kept.
  for (size_t words : {0, 1, 3, 4, 5, 46080, 65535, 65536, 65537, 70001}) {
    const std::vector<std::byte> page = Page(words * 8);
    EXPECT_EQ(PageSum(page), SumByDefinition(page)) << words;
  }
}

}  // namespace
}  // namespace promptcache
