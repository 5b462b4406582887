#include "cache_daemon/core/page_allocator.h"

#include <map>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_daemon/core/page_pool.h"
#include "common/byte_size.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::daemon {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kDomain = 100;

class PageAllocatorTest : public ::testing::Test {
 protected:
  PageAllocatorTest() { Make(16, 8); }
  ~PageAllocatorTest() override { PC_EXPECT_OK(pages_->CheckInvariants()); }
  void Make(uint64_t num_pages, uint64_t segment_pages) {
    absl::StatusOr<std::unique_ptr<PagePool>> pool =
        PagePool::Create({.device_bytes = num_pages * kPage,
                          .segment_bytes = segment_pages * kPage,
                          .min_page_bytes = 64});
    PC_ASSERT_OK(pool);
    pages_.reset();
    pool_ = *std::move(pool);
    pages_ = std::make_unique<PageAllocator>(pool_.get(), Tier::kDevice);
  }
  PageRuns Get(uint64_t n, uint64_t page_bytes = kPage,
               uint64_t domain = kDomain) {
    auto got = pages_->Allocate(n, page_bytes, domain, &owner_);
    EXPECT_TRUE(got.has_value());
    return got.has_value() ? got->runs : PageRuns{};
  }
  bool Has(uint64_t n, uint64_t page_bytes = kPage) {
    auto got = pages_->Allocate(n, page_bytes, kDomain, &owner_);
    if (got.has_value()) pages_->Free(got->runs);
    return got.has_value();
  }

  PageOwner owner_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PageAllocator> pages_;
};

TEST_F(PageAllocatorTest, WhatFitsIsOneRun) {
  EXPECT_THAT(Get(3), ElementsAre(PageRun{0, 0, 3}));
  EXPECT_THAT(Get(5), ElementsAre(PageRun{0, 3, 5}));
  EXPECT_THAT(Get(8), ElementsAre(PageRun{1, 0, 8}));
  EXPECT_EQ(pages_->used_bytes(), 16 * kPage);
  EXPECT_FALSE(Has(1));
}

TEST_F(PageAllocatorTest, TheBestFitIsTaken) {
  const PageRuns a = Get(2);
  const PageRuns b = Get(1);
  const PageRuns c = Get(3);
  const PageRuns d = Get(2);
  pages_->Free(a);
  pages_->Free(c);
  EXPECT_THAT(Get(2), ElementsAre(PageRun{0, 0, 2}));
  EXPECT_THAT(Get(3), ElementsAre(PageRun{0, 3, 3}));
}

TEST_F(PageAllocatorTest, FragmentsServeInSeveralRuns) {
  std::vector<PageRuns> singles;
  for (int i = 0; i < 16; ++i) singles.push_back(Get(1));
  for (size_t i = 0; i < 16; i += 2) pages_->Free(singles[i]);
  EXPECT_EQ(pages_->LargestFreeRunBytes(), kPage);
  const PageRuns all = Get(8);
  EXPECT_THAT(all, SizeIs(8));
  EXPECT_FALSE(Has(1));
}

TEST_F(PageAllocatorTest, AnEmptySegmentIsPreferredToPieces) {
  const PageRuns a = Get(2);
  const PageRuns b = Get(2);
  Get(2);
  pages_->Free(a);
  EXPECT_THAT(Get(3), ElementsAre(PageRun{1, 0, 3}));
}

TEST_F(PageAllocatorTest, FreedNeighboursAreMerged) {
  const PageRuns a = Get(2);
  const PageRuns b = Get(2);
  const PageRuns c = Get(2);
  Get(2);
  pages_->Free(a);
  pages_->Free(c);
  pages_->Free(b);
  EXPECT_THAT(Get(6), ElementsAre(PageRun{0, 0, 6}));
}

TEST_F(PageAllocatorTest, MoreThanThereIsChangesNothing) {
  Get(10);
  EXPECT_FALSE(pages_->Allocate(7, kPage, kDomain, &owner_).has_value());
  EXPECT_EQ(pages_->used_bytes(), 10 * kPage);
  EXPECT_EQ(pages_->FreePages(kPage), 6u);
}

TEST_F(PageAllocatorTest, ASegmentServesOnePageSizeAtATime) {
  const PageRuns small = Get(1);
  EXPECT_EQ(pages_->FreePages(2 * kPage), 4u);
  const PageRuns big = Get(4, 2 * kPage);
  EXPECT_THAT(big, ElementsAre(PageRun{1, 0, 4}));
  EXPECT_FALSE(Has(1, 2 * kPage));
  EXPECT_EQ(pages_->num_carvings(), 2u);
  pages_->Free(small);  // empty: carved anew
  EXPECT_EQ(pages_->page_bytes(0), 0u);
  EXPECT_TRUE(Has(4, 2 * kPage));
}

TEST_F(PageAllocatorTest, ASmallLastSegmentIsUsedForWhatFitsIt) {
  Make(11, 4);
  EXPECT_EQ(pages_->num_segments(), 3u);
  EXPECT_EQ(pages_->TotalPages(4 * kPage), 2u);
  Get(2, 4 * kPage);
  EXPECT_FALSE(Has(1, 4 * kPage));
  EXPECT_TRUE(Has(3));
}

TEST_F(PageAllocatorTest, OddPagesLeaveTheRestOfASegment) {
  EXPECT_EQ(pages_->TotalPages(3 * kPage), 4u);
  Get(4, 3 * kPage);
  EXPECT_FALSE(Has(1, 3 * kPage));
  EXPECT_EQ(pages_->used_bytes(), 12 * kPage);
}

TEST_F(PageAllocatorTest, ManyTinyPagesAreBoundedByTheGenerationArray) {
  EXPECT_EQ(pool_->generations_stride(), 8 * kPage / 64);
  EXPECT_EQ(pool_->PagesIn(0, 8), pool_->generations_stride());
}

TEST_F(PageAllocatorTest, PagesOfAnotherDomainMustBeZeroed) {
  pages_->Free(Get(4, kPage, 100));
  auto same = pages_->Allocate(2, kPage, 100, &owner_);
  EXPECT_THAT(same->must_zero, IsEmpty());
  auto other = pages_->Allocate(6, kPage, 200, &owner_);
  EXPECT_THAT(other->must_zero, ElementsAre(PageRun{0, 2, 2}));
}

TEST_F(PageAllocatorTest, CarvingAnewKeepsWhatLiesInThePages) {
  pages_->Free(Get(1, kPage, 100));
  auto same = pages_->Allocate(1, 2 * kPage, 100, &owner_);
  EXPECT_THAT(same->must_zero, IsEmpty());
  pages_->Free(same->runs);
  auto other = pages_->Allocate(1, kPage, 200, &owner_);
  EXPECT_THAT(other->must_zero, ElementsAre(PageRun{0, 0, 1}));
}

TEST_F(PageAllocatorTest, ForgottenBytesAreZeroedForEverybody) {
  const PageRuns runs = Get(2, kPage, 100);
  pages_->ForgetDomain({{0, 1, 1}});
  pages_->Free(runs);
  auto got = pages_->Allocate(2, kPage, 100, &owner_);
  EXPECT_THAT(got->must_zero, ElementsAre(PageRun{0, 1, 1}));
}

TEST_F(PageAllocatorTest, MixedBytesAreZeroedForEverybody) {
  const PageRuns a = Get(1, kPage, 100);
  const PageRuns b = Get(1, kPage, 200);
  pages_->Free(a);
  pages_->Free(b);
  auto got = pages_->Allocate(1, 2 * kPage, 100, &owner_);
  EXPECT_THAT(got->must_zero, ElementsAre(PageRun{0, 0, 1}));
}

TEST_F(PageAllocatorTest, OwnersOfASegmentAreTold) {
  PageOwner other;
  Get(2);
  ASSERT_TRUE(pages_->Allocate(1, kPage, kDomain, &other).has_value());
  EXPECT_THAT(pages_->Owners(0), ElementsAre(&owner_, &owner_, &other));
  EXPECT_THAT(pages_->Owners(1), IsEmpty());
}

TEST_F(PageAllocatorTest, RandomUseKeepsEveryInvariant) {
  Make(61, 16);
  std::mt19937 random(7);
  std::vector<std::pair<PageRuns, uint64_t>> live;
  uint64_t used = 0;
  const uint64_t sizes[] = {kPage, 2 * kPage, 3 * kPage};
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 && !live.empty()) {
      const size_t i = random() % live.size();
      used -= live[i].second;
      pages_->Free(live[i].first);
      live.erase(live.begin() + static_cast<long>(i));
    } else {
      const uint64_t page_bytes = sizes[random() % 3];
      const uint64_t n = 1 + random() % 9;
      const bool expected = pages_->FreePages(page_bytes) >= n;
      auto got = pages_->Allocate(n, page_bytes, 2 + random() % 3, &owner_);
      ASSERT_EQ(got.has_value(), expected);
      if (got.has_value()) {
        live.emplace_back(got->runs, n * page_bytes);
        used += n * page_bytes;
      }
    }
    ASSERT_EQ(pages_->used_bytes(), used);
    PC_ASSERT_OK(pages_->CheckInvariants());
  }
  for (const auto& [runs, bytes] : live) pages_->Free(runs);
  EXPECT_EQ(pages_->LargestFreeRunBytes(), 16 * kPage);
  EXPECT_EQ(pages_->num_carvings(), 0u);
}

TEST(PagePoolTest, BudgetsAreMetByTheSumOfSegments) {
  absl::StatusOr<std::unique_ptr<PagePool>> pool =
      PagePool::Create({.device_bytes = 10 * kPage + 17,
                        .host_bytes = 3 * kPage,
                        .segment_bytes = 4 * kPage});
  PC_ASSERT_OK(pool);
  EXPECT_EQ((*pool)->num_segments(), 4u);
  EXPECT_EQ((*pool)->tier_bytes(Tier::kDevice), 10 * kPage);
  EXPECT_EQ((*pool)->segment_bytes(2), 2 * kPage);
  EXPECT_EQ((*pool)->tier(2), Tier::kDevice);
  EXPECT_EQ((*pool)->tier(3), Tier::kHost);
  EXPECT_EQ((*pool)->kind(Tier::kNone), "none");
}

TEST(PagePoolTest, MoreThanThereIsInAllIsRefusedBeforeAnyIsTaken) {
  // No segment alone is too large.
  PagePool::Options options{.device_bytes = 8 * kPage,
                            .host_bytes = 8 * kPage,
                            .segment_bytes = 4 * kPage,
                            .available_bytes = 16 * kPage};
  PC_EXPECT_OK(PagePool::Create(options));
  options.available_bytes = 15 * kPage;
  EXPECT_THAT(PagePool::Create(options),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr(absl::StrCat(
                                 RoundedByteSize(16 * kPage), " asked, ",
                                 RoundedByteSize(15 * kPage), " available")),
                             HasSubstr("--host_bytes"))));
  // And what does not fit in 64 bits.
  options.device_bytes = UINT64_MAX - kPage;
  EXPECT_THAT(PagePool::Create(options),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("")));
}

TEST(PagePoolTest, AReaderSeesStampsThroughItsOwnMapping) {
  absl::StatusOr<std::unique_ptr<PagePool>> pool =
      PagePool::Create({.device_bytes = 8 * kPage, .segment_bytes = 4 * kPage});
  PC_ASSERT_OK(pool);
  UniqueFd fd(::dup((*pool)->generations_fd()));
  absl::StatusOr<gpu::MappedSegment> mapped = gpu::MappedSegment::Map(
      std::move(fd), (*pool)->generations_bytes(), /*writable=*/false);
  PC_ASSERT_OK(mapped);
  (*pool)->Stamp({{1, 2, 2}}, 77);
  const auto* words = reinterpret_cast<const uint64_t*>(mapped->read_base());
  const uint32_t stride = (*pool)->generations_stride();
  EXPECT_EQ(words[stride + 1], 0u);
  EXPECT_EQ(words[stride + 2], 77u);
  EXPECT_EQ(words[stride + 3], 77u);
}

TEST(PagePoolTest, CopiesPageByPageBetweenDifferentRuns) {
  absl::StatusOr<std::unique_ptr<PagePool>> pool =
      PagePool::Create({.device_bytes = 8 * kPage, .segment_bytes = 4 * kPage});
  PC_ASSERT_OK(pool);
  for (uint32_t p = 0; p < 3; ++p) {
    (*pool)->Page(0, p, kPage)[0] = static_cast<std::byte>(p + 1);
  }
  const PageRuns from{{0, 0, 3}};
  const PageRuns to{{1, 3, 1}, {1, 0, 2}};
  const std::vector<uint64_t> sums = *(*pool)->Copy(from, to, kPage);
  EXPECT_EQ(sums, *(*pool)->Sums(from, kPage));
  EXPECT_EQ(sums, *(*pool)->Sums(to, kPage));
  EXPECT_EQ((*pool)->Page(1, 3, kPage)[0], std::byte{1});
  EXPECT_EQ((*pool)->Page(1, 1, kPage)[0], std::byte{3});
}

TEST(PagePoolTest, ATierThatIsTooSmallIsToldTheLeast) {
  EXPECT_THAT(PagePool::Create({.device_bytes = 64}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "--device_bytes: 64 is too small, the least is 4096"));
}

TEST(PagePoolTest, BadOptionsAreRefused) {
  for (const PagePool::Options& options :
       {PagePool::Options{.device_bytes = 100},
        PagePool::Options{.segment_bytes = 5000},
        PagePool::Options{.segment_bytes = 0},
        PagePool::Options{.min_page_bytes = 0}}) {
    EXPECT_THAT(PagePool::Create(options),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("")));
  }
}

}  // namespace
}  // namespace promptcache::daemon
