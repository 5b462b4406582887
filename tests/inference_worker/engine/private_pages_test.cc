#include "inference_worker/engine/private_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

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

TEST(PrivatePagesTest, RemembersTheMostThatWereOutAtOneTime) {
  auto pool = Pool(5);
  EXPECT_EQ(pool->peak_pages(), 0u);
  auto first = pool->Allocate(2);
  auto second = pool->Allocate(1);
  PC_ASSERT_OK(first);
  PC_ASSERT_OK(second);
  pool->Free(*first);
  EXPECT_FALSE(pool->Allocate(5).ok());
  EXPECT_EQ(pool->peak_pages(), 3u);
  pool->Free(*second);
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

// What of the bytes from `first` on is in memory.
size_t ResidentBytes(const std::byte* first, size_t num_bytes) {
  constexpr size_t kSystemPage = 4096;
  std::vector<unsigned char> present(num_bytes / kSystemPage);
  EXPECT_EQ(mincore(const_cast<std::byte*>(first), num_bytes, present.data()),
            0);
  return kSystemPage * static_cast<size_t>(std::ranges::count_if(
                           present, [](auto byte) { return byte & 1; }));
}

// 64 KiB a page: 32 to a growth.
constexpr KvLayout kWideLayout = {
    .num_layers = 16, .num_kv_heads = 2, .head_dim = 64, .page_tokens = 8};

TEST(PrivatePagesTest, HoldsWhatWasInUseAtOnceNotItsBudget) {
  constexpr uint64_t kCapacity = uint64_t{32} << 20;
  constexpr size_t kGrowth = PrivatePages::kGrowthBytes;
  auto pool = PrivatePages::Create(kWideLayout, kCapacity);
  PC_ASSERT_OK(pool);
  auto first = (*pool)->Allocate(1);
  PC_ASSERT_OK(first);
  const std::byte* const base = first->front();
  const size_t at_first = ResidentBytes(base, kCapacity);
  EXPECT_GE(at_first, kWideLayout.page_bytes());
  EXPECT_LE(at_first, 2 * kGrowth);  // a huge page may reach beyond its end

  auto more = (*pool)->Allocate(5 * kGrowth / kWideLayout.page_bytes());
  PC_ASSERT_OK(more);
  const size_t at_most = ResidentBytes(base, kCapacity);
  EXPECT_GE(at_most, 5 * kGrowth);
  EXPECT_LE(at_most, 7 * kGrowth);

  // One after the other: the same ones again.
  (*pool)->Free(*more);
  (*pool)->Free(*first);
  for (int round = 0; round < 20; ++round) {
    auto pages = (*pool)->Allocate(32);
    PC_ASSERT_OK(pages);
    (*pool)->Free(*pages);
  }
  EXPECT_EQ(ResidentBytes(base, kCapacity), at_most);
}

TEST(PrivatePagesTest, GrowsToItsWholeBudgetAndNotBeyond) {
  // Not a whole number of growths.
  const uint64_t capacity =
      3 * PrivatePages::kGrowthBytes / 2 + kWideLayout.page_bytes();
  auto pool = PrivatePages::Create(kWideLayout, capacity);
  PC_ASSERT_OK(pool);
  auto pages = (*pool)->Allocate((*pool)->capacity_pages());
  PC_ASSERT_OK(pages);
  EXPECT_EQ(ResidentBytes(pages->front(), capacity), capacity);
  EXPECT_EQ(pages->back() + kWideLayout.page_bytes(),
            pages->front() + capacity);
  EXPECT_FALSE((*pool)->Allocate(1).ok());
  (*pool)->Free(*pages);
}

TEST(PrivatePagesTest, ThreadsThatGrowItNeverShareAPage) {
  auto pool = PrivatePages::Create(kWideLayout, uint64_t{16} << 20);
  PC_ASSERT_OK(pool);
  std::vector<int> torn(4, 0);
  std::vector<std::thread> threads;
  for (size_t id = 0; id < torn.size(); ++id) {
    threads.emplace_back([&pool, &torn, id] {
      std::vector<std::byte*> all;
      for (int i = 0; i < 16; ++i) {
        auto pages = (*pool)->Allocate(3);
        if (!pages.ok()) continue;
        for (std::byte* p : *pages) {
          std::memset(p, static_cast<int>(id + 1), kWideLayout.page_bytes());
        }
        all.insert(all.end(), pages->begin(), pages->end());
      }
      for (const std::byte* p : all) {
        torn[id] += std::count(p, p + kWideLayout.page_bytes(),
                               static_cast<std::byte>(id + 1)) !=
                    static_cast<std::ptrdiff_t>(kWideLayout.page_bytes());
      }
      (*pool)->Free(all);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(torn, Each(0));
  EXPECT_EQ((*pool)->free_pages(), (*pool)->capacity_pages());
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
