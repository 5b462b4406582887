#include "inference_worker/engine/private_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr KvLayout kLayout = {
    .num_layers = 2, .num_kv_heads = 1, .head_dim = 8, .page_tokens = 4};

std::unique_ptr<PrivatePages> Pool(uint64_t num_pages) {
  auto pool = PrivatePages::Create(kLayout, num_pages * kLayout.page_bytes());
  PC_EXPECT_OK(pool);
  return std::move(pool).value();
}

TEST(PrivatePagesTest, HandsOutExactlyItsCapacity) {
  auto pool = Pool(3);
  EXPECT_EQ(pool->capacity_pages(), 3u);
  auto pages = pool->Allocate(3);
  PC_ASSERT_OK(pages);
  EXPECT_EQ(std::set<std::byte*>(pages->begin(), pages->end()).size(), 3u);
  EXPECT_EQ(pool->free_pages(), 0u);
  EXPECT_THAT(pool->Allocate(1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("1 asked for"), HasSubstr("0 of 3"))));
  pool->Free(*pages);
  EXPECT_EQ(pool->free_pages(), 3u);
}

TEST(PrivatePagesTest, AllocatesAllOrNothing) {
  auto pool = Pool(3);
  auto one = pool->Allocate(1);
  PC_ASSERT_OK(one);
  EXPECT_THAT(pool->Allocate(3),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("3")));
  EXPECT_THAT(
      pool->Allocate(1'000'000),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1000000")));
  EXPECT_EQ(pool->free_pages(), 2u);
  pool->Free(*one);
}

TEST(PrivatePagesTest, PagesDoNotOverlapAndAreZeroAtEveryHandOut) {
  auto pool = Pool(2);
  const size_t page_bytes = kLayout.page_bytes();
  for (int round = 0; round < 2; ++round) {
    auto pages = pool->Allocate(2);
    PC_ASSERT_OK(pages);
    for (std::byte* page : *pages) {
      EXPECT_EQ(std::count(page, page + page_bytes, std::byte{0}),
                static_cast<std::ptrdiff_t>(page_bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(page) % 64, 0u);
      std::memset(page, 0xff, page_bytes);
    }
    pool->Free(*pages);
  }
}

TEST(PrivatePagesTest, NothingAllocatedIsNothing) {
  auto pool = Pool(1);
  auto none = pool->Allocate(0);
  PC_ASSERT_OK(none);
  EXPECT_TRUE(none->empty());
  pool->Free(*none);
  EXPECT_EQ(pool->free_pages(), 1u);
}

TEST(PrivatePagesTest, RefusesACapacityBelowOnePage) {
  EXPECT_THAT(PrivatePages::Create(kLayout, kLayout.page_bytes() - 1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(std::to_string(kLayout.page_bytes() - 1))));
  EXPECT_THAT(
      PrivatePages::Create(KvLayout{}, 1 << 20),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("KV layout")));
}

TEST(PrivatePagesTest, OddPageSizesStayWithinTheBudgetAndAligned) {
  const KvLayout odd = {
      .num_layers = 1, .num_kv_heads = 1, .head_dim = 3, .page_tokens = 5};
  auto pool = PrivatePages::Create(odd, 640);  // 60 bytes in strides of 64
  PC_ASSERT_OK(pool);
  EXPECT_EQ((*pool)->capacity_pages(), 10u);
  auto pages = (*pool)->Allocate(10);
  PC_ASSERT_OK(pages);
  for (std::byte* page : *pages) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(page) % 64, 0u);
  }
  (*pool)->Free(*pages);
}

TEST(PrivatePagesTest, ThreadsNeverShareAPage) {
  auto pool = Pool(16);
  std::vector<int> torn(4, 0);
  std::vector<std::thread> threads;
  for (size_t id = 0; id < torn.size(); ++id) {
    threads.emplace_back([&pool, &torn, id] {
      for (int i = 0; i < 200; ++i) {
        auto pages = pool->Allocate(1 + id);
        if (!pages.ok()) continue;
        for (std::byte* p : *pages) *p = static_cast<std::byte>(id + 1);
        for (std::byte* p : *pages) {
          if (*p != static_cast<std::byte>(id + 1)) ++torn[id];
        }
        pool->Free(*pages);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(torn, Each(0));
  EXPECT_EQ(pool->free_pages(), 16u);
}

}  // namespace
}  // namespace promptcache::worker
