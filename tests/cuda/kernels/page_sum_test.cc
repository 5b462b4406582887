#include "cuda/kernels/page_sum.h"

#include "common/page_sum.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

class PageSumTest : public KernelTest {
 protected:
  std::vector<std::byte> RandomBytes(size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random_());
    return bytes;
  }
};

TEST_F(PageSumTest, IsTheHostsSum) {
  // One word, a part of the grid less and more one word, several parts.
  for (const size_t words : {1u, 31u, 4095u, 4096u, 4097u, 20000u}) {
    const size_t page_bytes = words * 8;
    std::vector<std::vector<std::byte>> pages;
    std::vector<const std::byte*> addresses;
    for (int i = 0; i < 3; ++i) {
      pages.push_back(RandomBytes(page_bytes));
      addresses.push_back(Upload(pages.back()));
    }
    const PageSumParams params = {.pages = Upload(addresses),
                                  .sums = Room<uint64_t>(3),
                                  .num_pages = 3,
                                  .page_bytes = page_bytes};
    PC_ASSERT_OK(Launched(LaunchPageSum(params, stream_->native())));
    const auto sums = Download(params.sums, 3);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(sums[i], PageSum(pages[i])) << words << " words, page " << i;
    }
  }
}

TEST_F(PageSumTest, NothingAndUnevenPages) {
  EXPECT_EQ(
      LaunchPageSum({.num_pages = 0, .page_bytes = 64}, stream_->native()),
      cudaSuccess);
  EXPECT_EQ(
      LaunchPageSum({.num_pages = 1, .page_bytes = 12}, stream_->native()),
      cudaErrorInvalidValue);
}

}  // namespace
}  // namespace promptcache::gpu
