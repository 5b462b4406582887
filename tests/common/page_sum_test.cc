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

}  // namespace
}  // namespace promptcache
