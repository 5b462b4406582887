// Reasons of misses, LRU, time to live, pins, zeroing, several page sizes.
#include <limits>
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

using EvictionTest = CacheFixture;
using ExpiryTest = CacheFixture;
using MissReasonTest = CacheFixture;
using PinTest = CacheFixture;
using IsolationTest = CacheFixture;

TEST_F(EvictionTest, TheLeastRecentlyUsedGoesFirst) {
  Make({.device_pages = 3});
  const SessionId a = Open();
  for (int m : {1, 2, 3}) {
    PutFree(a, m);
    clock_.Advance(absl::Seconds(10));
  }
  EXPECT_TRUE(Touch(a, 1));
  EXPECT_EQ(AskOne(a, 4).outcome, Outcome::kReserved);
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kEvicted);
  EXPECT_TRUE(Touch(a, 1));
  EXPECT_TRUE(Touch(a, 3));
  const Counted& evicted =
      cache_->Stats().evictions[static_cast<size_t>(EvictReason::kCapacity)];
  EXPECT_EQ(evicted.count, 1u);
  EXPECT_EQ(evicted.volume, kPageBytes);
}

TEST_F(EvictionTest, AmongEquallyOldTheCheapestPerByteGoesFirst) {
  Make({.device_pages = 4});
  const SessionId a = Open();
  PutFree(a, 1, 2, {}, /*compute_us=*/1000);  // 500 a page
  PutFree(a, 2, 1, {}, /*compute_us=*/400);
  PutFree(a, 3, 1, {}, /*compute_us=*/600);
  AskOne(a, 4);
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kEvicted);
  EXPECT_TRUE(Touch(a, 1, 2));
}

TEST_F(EvictionTest, CostDoesNotSaveWhatIsOlderThanTheWindow) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1, 1, {}, /*compute_us=*/1'000'000);
  clock_.Advance(absl::Seconds(2));
  PutFree(a, 2, 1, {}, /*compute_us=*/1);
  AskOne(a, 3);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kEvicted);
  EXPECT_TRUE(Touch(a, 2));
}

TEST_F(EvictionTest, LeasedModulesStay) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  const LeaseId lease = Put(a, 1);
  Put(a, 2);
  EXPECT_EQ(AskOne(a, 3).miss_reason, MissReason::kNoMemory);
  Release(a, lease);
  EXPECT_EQ(AskOne(a, 3).outcome, Outcome::kReserved);
  EXPECT_TRUE(Touch(a, 2));
}

TEST_F(EvictionTest, NothingGoesForWhatCannotFit) {
  Make({.device_pages = 4});
  const SessionId a = Open();
  PutFree(a, 1);
  PutFree(a, 2);
  Put(a, 3);
  EXPECT_EQ(AskOne(a, 4, 4).miss_reason, MissReason::kNoMemory);
  EXPECT_EQ(AskOne(a, 5, 1000).miss_reason, MissReason::kNoMemory);
  EXPECT_TRUE(Touch(a, 1));
  EXPECT_TRUE(Touch(a, 2));
}

TEST_F(EvictionTest, OneAcquireNeverEvictsWhatItHits) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1);
  PutFree(a, 2);
  // The missing one is asked for first; module 1 is the oldest.
  const std::vector<AcquireKey> keys = {{.key = KeyOf(3), .num_tokens = 16},
                                        {.key = KeyOf(1), .num_tokens = 16}};
  absl::StatusOr<AcquireResult> result =
      cache_->Acquire(a, {.keys = keys, .reserve_missing = true});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].outcome, Outcome::kReserved);
  EXPECT_EQ(result->modules[1].outcome, Outcome::kHit);
}

TEST_F(EvictionTest, RequestedEvictionOfALeasedModuleIsDeferredAndHidden) {
  const SessionId a = Open();
  const LeaseId lease = Put(a, 1, 2);
  absl::StatusOr<EvictResult> result = cache_->Evict({.schema = "s"});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->num_evicted, 0u);
  EXPECT_EQ(result->num_deferred, 1u);
  EXPECT_EQ(CountIn(ModuleState::kEvicted), 1u);
  EXPECT_EQ(WhyMissing(a, 1, 2), MissReason::kEvicted);
  EXPECT_EQ(UsedPages(), 2u);
  // Encoded anew beside the old one.
  const AcquiredModule again = AskOne(a, 1, 2);
  EXPECT_EQ(again.outcome, Outcome::kReserved);
  EXPECT_EQ(again.miss_reason, MissReason::kEvicted);
  Release(a, lease);
  EXPECT_EQ(UsedPages(), 2u);
  EXPECT_EQ(CountIn(ModuleState::kEvicted), 0u);
}

TEST_F(EvictionTest, FreedPagesLoseTheirGenerationAndNeverGetItAgain) {
  const SessionId a = Open();
  const AcquiredModule first = AskOne(a, 1);
  PC_EXPECT_OK(cache_->Abort(a, {&first.reservation, 1}));
  const PageRun run = first.runs[0];
  EXPECT_EQ(pool_->Generation(run.segment, run.first_page), 0u);
  const AcquiredModule second = AskOne(a, 1);
  ASSERT_EQ(second.runs, first.runs);
  EXPECT_GT(second.generation, first.generation);
  EXPECT_EQ(pool_->Generation(run.segment, run.first_page), second.generation);
}

TEST_F(MissReasonTest, IdentityDiffersNamesTheFirstField) {
  const SessionId a = Open();
  AcquireKey key{.key = KeyOf(1),
                 .num_tokens = 16,
                 .path = "doc",
                 .parts = {1, 2, 3, 4, 5, 6, 7}};
  AcquireRequest request{
      .keys = {&key, 1}, .reserve_missing = true, .schema = "s"};
  absl::StatusOr<AcquireResult> result = cache_->Acquire(a, request);
  PC_ASSERT_OK(result);
  CommitModule commit = Sealed(result->modules[0], 1);
  commit.metadata.path = "doc";
  PC_ASSERT_OK(cache_->Commit(a, {&commit, 1}));

  request.reserve_missing = false;
  key.key = KeyOf(2);
  key.parts = {1, 2, 3, 4, 50, 60, 7};
  result = cache_->Acquire(a, request);
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].miss_reason, MissReason::kIdentityDiffers);
  EXPECT_EQ(result->modules[0].differing_field, IdentityField::kContext);
  for (size_t field = 0; field <= kNumIdentityFields; ++field) {
    const Counted& counted = cache_->Stats().differing[field];
    const bool is_context =
        field == static_cast<size_t>(IdentityField::kContext);
    EXPECT_EQ(counted.count, is_context ? 1u : 0u) << field;
    EXPECT_EQ(counted.volume, is_context ? 16u : 0u) << field;
  }

  key.path = "another name";
  result = cache_->Acquire(a, request);
  EXPECT_EQ(result->modules[0].miss_reason, MissReason::kNeverSeen);
  key.path = "doc";
  request.isolation_domain = "tenant-2";  // names are a domain's own
  result = cache_->Acquire(a, request);
  EXPECT_EQ(result->modules[0].miss_reason, MissReason::kNeverSeen);
  request.isolation_domain = "default";
  key.parts = {};  // not told
  result = cache_->Acquire(a, request);
  EXPECT_EQ(result->modules[0].miss_reason, MissReason::kNeverSeen);
}

TEST_F(MissReasonTest, KnownFromBeforeARestartIsNotResident) {
  ModuleInfo info;
  info.key = KeyOf(1);
  info.metadata.schema = "s";
  info.metadata.path = "m1";
  info.metadata.num_tokens = 16;
  info.isolation_domain = "default";
  cache_->AddKnown(info, {1, 2, 3, 4, 5, 6, 7});
  const SessionId a = Open();
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kNotResident);
  EXPECT_EQ(Info(1).absence, MissReason::kNotResident);
  PutFree(a, 1);
  EXPECT_EQ(Info(1).absence, MissReason::kNone);
  cache_->AddKnown(info, {});  // it is resident: ignored
  EXPECT_TRUE(Touch(a, 1));
}

TEST_F(MissReasonTest, EveryReasonIsCountedInLookupsAndTokens) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1, 2);             // never seen: 32 tokens
  EXPECT_TRUE(Touch(a, 1, 2));  // hit: 32
  PutFree(a, 2, 1);             // never seen: 16, evicts module 1
  WhyMissing(a, 1, 2);          // evicted: 32
  AskOne(a, 3, 3);              // no memory: 48
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.hit_lookups, 1u);
  EXPECT_EQ(stats.hit_tokens, 32u);
  EXPECT_EQ(stats.miss_lookups, 4u);
  EXPECT_EQ(stats.miss_tokens, 128u);
  const auto of = [&](MissReason r) {
    return stats.misses[static_cast<size_t>(r)];
  };
  EXPECT_EQ(of(MissReason::kNeverSeen).count, 2u);
  EXPECT_EQ(of(MissReason::kNeverSeen).volume, 48u);
  EXPECT_EQ(of(MissReason::kEvicted).volume, 32u);
  EXPECT_EQ(of(MissReason::kNoMemory).volume, 48u);
}

TEST_F(MissReasonTest, WhatIsRememberedIsBounded) {
  Config config{.device_pages = 1};
  config.options.max_known_modules = 2;
  Make(config);
  const SessionId a = Open();
  for (int m : {1, 2, 3, 4}) PutFree(a, m);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kNeverSeen);
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kEvicted);
  EXPECT_EQ(WhyMissing(a, 3), MissReason::kEvicted);
}

TEST_F(ExpiryTest, SlidingTimeRunsFromTheLastUse) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(100)});
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(absl::Seconds(90));
    EXPECT_TRUE(Touch(a, 1));
    cache_->ExpireDue();
  }
  clock_.Advance(absl::Seconds(101));
  EXPECT_EQ(UsedPages(), 1u);  // lazily: nobody has looked
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(ExpiryTest, AbsoluteTimeRunsFromTheCommit) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(100), .absolute_ttl = true});
  clock_.Advance(absl::Seconds(90));
  EXPECT_TRUE(Touch(a, 1));
  clock_.Advance(absl::Seconds(20));
  cache_->ExpireDue();
  EXPECT_EQ(UsedPages(), 0u);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_EQ(cache_->Stats()
                .evictions[static_cast<size_t>(EvictReason::kExpired)]
                .count,
            1u);
}

TEST_F(ExpiryTest, ALeasedModuleIsInUseUntilItIsReleased) {
  const SessionId a = Open();
  const LeaseId lease = Put(a, 1, 1, {.ttl = absl::Seconds(10)});
  clock_.Advance(absl::Seconds(1000));
  cache_->ExpireDue();
  EXPECT_TRUE(Touch(a, 1));
  Release(a, lease);
  clock_.Advance(absl::Seconds(11));
  cache_->ExpireDue();
  clock_.Advance(absl::Seconds(11));
  cache_->ExpireDue();
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(ExpiryTest, ALeasedModuleOfAbsoluteTimeIsHiddenAtOnce) {
  const SessionId a = Open();
  const LeaseId lease =
      Put(a, 1, 1, {.ttl = absl::Seconds(10), .absolute_ttl = true});
  clock_.Advance(absl::Seconds(11));
  cache_->ExpireDue();
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_EQ(UsedPages(), 1u);
  Release(a, lease);
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(ExpiryTest, ListingDoesNotRenew) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(100)});
  clock_.Advance(absl::Seconds(99));
  PC_EXPECT_OK(cache_->List({}));
  Info(1);
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
}

TEST_F(ExpiryTest, TheDefaultIsTheCachesOwn) {
  Config config;
  config.options.default_ttl = absl::Seconds(5);
  Make(config);
  const SessionId a = Open();
  PutFree(a, 1);
  EXPECT_EQ(Info(1).expire_time, clock_.Now() + absl::Seconds(5));
  PutFree(a, 2, 1, {.ttl = absl::InfiniteDuration()});
  EXPECT_EQ(Info(2).expire_time, absl::InfiniteFuture());
  clock_.Advance(absl::Hours(24 * 365));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_TRUE(Touch(a, 2));
}

TEST_F(ExpiryTest, ExpiredGoBeforeAnythingElseIsEvicted) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1);
  PutFree(a, 2, 1, {.ttl = absl::Seconds(1)});
  clock_.Advance(absl::Seconds(2));
  AskOne(a, 3);
  EXPECT_TRUE(Touch(a, 1));
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kExpired);
}

TEST_F(PinTest, APinnedModuleSurvivesPressureAndIdleness) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(10), .pin = true});
  EXPECT_TRUE(Info(1).pinned);
  EXPECT_EQ(Info(1).expire_time, absl::InfiniteFuture());
  for (int m : {2, 3, 4}) PutFree(a, m);
  clock_.Advance(absl::Hours(1));
  cache_->ExpireDue();
  EXPECT_TRUE(Touch(a, 1));
}

TEST_F(PinTest, AbsoluteTimeEndsAPinnedModule) {
  const SessionId a = Open();
  PutFree(a, 1, 1,
          {.ttl = absl::Seconds(10), .absolute_ttl = true, .pin = true});
  clock_.Advance(absl::Seconds(11));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_EQ(cache_->Stats().pinned_bytes, 0u);
}

TEST_F(PinTest, TheBudgetIsAtMostHalfOfAllTiers) {
  Config config{.device_pages = 8, .host_pages = 4};
  config.options.pin_budget_bytes = uint64_t{1} << 30;
  Make(config);
  EXPECT_EQ(cache_->Stats().pin_budget_bytes, 6 * kPageBytes);
  const SessionId a = Open();
  PutFree(a, 1, 6, {.pin = true});
  PutFree(a, 2, 1, {.pin = true});
  EXPECT_TRUE(Info(1).pinned);
  EXPECT_FALSE(Info(2).pinned);
}

TEST_F(PinTest, TheBudgetIsKept) {
  Config config;
  config.options.pin_budget_bytes = 2 * kPageBytes;
  Make(config);
  const SessionId a = Open();
  PutFree(a, 1, 2, {.pin = true});
  PutFree(a, 2, 1, {.pin = true});
  EXPECT_TRUE(Info(1).pinned);
  EXPECT_FALSE(Info(2).pinned);
  absl::StatusOr<PinResult> result =
      cache_->Pin({.schema = "s", .path = "m2"}, /*pin=*/true);
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->num_changed, 0u);
  EXPECT_EQ(result->num_refused, 1u);
  EXPECT_EQ(cache_->Stats().pins_refused, 2u);  // the commit's, too
  EXPECT_EQ(result->pinned_bytes, 2 * kPageBytes);
  EXPECT_EQ(result->pin_budget_bytes, 2 * kPageBytes);
  result = cache_->Pin({.keys = {KeyOf(1).ToHex()}}, /*pin=*/false);
  EXPECT_THAT(result->keys, ::testing::ElementsAre(KeyOf(1)));
  for (const bool again : {false, true}) {
    result = cache_->Pin({.keys = {KeyOf(2).ToHex()}}, /*pin=*/true);
    EXPECT_EQ(result->num_changed, again ? 0u : 1u);
    EXPECT_EQ(result->num_unchanged, again ? 1u : 0u);
    EXPECT_EQ(result->num_refused, 0u);
  }
}

TEST_F(PinTest, TimeDoesNotRunWhilePinned) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(10), .pin = true});
  clock_.Advance(absl::Hours(1));
  PC_EXPECT_OK(cache_->Pin({.all = true}, /*pin=*/false));
  EXPECT_TRUE(Touch(a, 1));
  clock_.Advance(absl::Seconds(11));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
}

TEST_F(PinTest, AnEvictedPinGivesItsBudgetBack) {
  const SessionId a = Open();
  PutFree(a, 1, 2, {.pin = true});
  absl::StatusOr<EvictResult> evicted = cache_->Evict({.all = true});
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_evicted, 1u);
  EXPECT_EQ(evicted->bytes, 2 * kPageBytes);
  EXPECT_EQ(cache_->Stats().pinned_bytes, 0u);
}

TEST_F(PinTest, APinFromBeforeARestartHoldsAgainOnceCommitted) {
  ModuleInfo info;
  info.key = KeyOf(1);
  info.metadata.policy.pin = true;
  cache_->AddKnown(info, {});
  PutFree(Open(), 1);
  EXPECT_TRUE(Info(1).pinned);
}

TEST_F(PinTest, APinOutlivesCorruptionButNotARequestedEviction) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.pin = true});
  const AcquiredModule hit = AskOne(a, 1);
  Fill(hit.runs, 99);
  EXPECT_TRUE(cache_->ReportCorruption(KeyOf(1), hit.generation));
  PutFree(a, 1);
  EXPECT_TRUE(Info(1).pinned);
  PC_EXPECT_OK(cache_->Evict({.all = true}));
  PutFree(a, 1);
  EXPECT_FALSE(Info(1).pinned);
}

TEST_F(IsolationTest, PagesOfAnotherDomainAreZeroed) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1, 2);
  EXPECT_TRUE(Holds(AskOne(a, 1, 2).runs, 1));
  cache_->CloseSession(a, "done");
  const SessionId b = Open();
  const AcquireResult result = Ask(b, 2, 2, true, "tenant-2");
  ASSERT_EQ(result.modules[0].outcome, Outcome::kReserved);
  EXPECT_TRUE(Holds(result.modules[0].runs, 0));
}

TEST_F(IsolationTest, ZeroingIsForTheChangedPagesOnly) {
  Make({.device_pages = 2});
  const SessionId a = Open();
  PutFree(a, 1, 1);
  const AcquireResult other = Ask(a, 2, 1, true, "tenant-2");
  Fill(other.modules[0].runs, 2);
  CommitOne(a, other.modules[0], 2);
  Release(a, other.lease);
  const AcquireResult result = Ask(a, 3, 2, true, "tenant-2");
  ASSERT_EQ(result.modules[0].outcome, Outcome::kReserved);
  PageRuns first{{0, 0, 1}};
  PageRuns second{{0, 1, 1}};
  EXPECT_TRUE(Holds(first, 0));
  EXPECT_TRUE(Holds(second, 2));
}

TEST_F(IsolationTest, ASegmentCarvedAnewShowsNothingOfTheOldBytes) {
  Make({.device_pages = 8});
  const SessionId a = Open();
  PutFree(a, 1, 8);
  const PageShape big{.page_bytes = 3 * kPageBytes, .page_tokens = 16};
  const SessionId b = Open(ProcessId{}, "w", big);
  const AcquireResult result = Ask(b, 2, 2, true, "tenant-2");
  ASSERT_EQ(result.modules[0].outcome, Outcome::kReserved);
  EXPECT_TRUE(Holds(result.modules[0].runs, 0, big.page_bytes));
}

TEST_F(EvictionTest, AnotherPageSizeTakesTheLongestUnusedSegment) {
  Make({.device_pages = 16, .segment_pages = 8});
  const SessionId a = Open();
  PutFree(a, 1, 8);
  clock_.Advance(absl::Seconds(10));
  PutFree(a, 2, 8);
  const PageShape big{.page_bytes = 2 * kPageBytes, .page_tokens = 16};
  const SessionId b = Open(ProcessId{}, "w", big);
  EXPECT_EQ(AskOne(b, 3, 4).outcome, Outcome::kReserved);
  EXPECT_EQ(WhyMissing(a, 1, 8), MissReason::kEvicted);
  EXPECT_TRUE(Touch(a, 2, 8));
}

TEST_F(EvictionTest, ASegmentWithALeasedPageIsNotTaken) {
  Make({.device_pages = 8, .segment_pages = 8});
  const SessionId a = Open();
  PutFree(a, 1, 7);
  Put(a, 2, 1);
  const PageShape big{.page_bytes = 2 * kPageBytes, .page_tokens = 16};
  const SessionId b = Open(ProcessId{}, "w", big);
  EXPECT_EQ(AskOne(b, 3, 1).miss_reason, MissReason::kNoMemory);
  EXPECT_TRUE(Touch(a, 1, 7));
}

TEST_F(EvictionTest, AnOldSegmentGoesBeforeARecentModuleOfTheRightSize) {
  Make({.device_pages = 16, .segment_pages = 8});
  const SessionId a = Open();
  PutFree(a, 1, 8);
  clock_.Advance(absl::Seconds(10));
  const PageShape big{.page_bytes = 2 * kPageBytes, .page_tokens = 16};
  const SessionId b = Open(ProcessId{}, "w", big);
  const AcquireResult second = Ask(b, 2, 4);
  const CommitModule commit = Sealed(second.modules[0], 2, {}, 0, big);
  PC_ASSERT_OK(cache_->Commit(b, {&commit, 1}));
  Release(b, second.lease);
  EXPECT_EQ(AskOne(b, 3, 1).outcome, Outcome::kReserved);
  EXPECT_EQ(WhyMissing(a, 1, 8), MissReason::kEvicted);
  EXPECT_TRUE(Touch(b, 2, 4));
}

}  // namespace
}  // namespace promptcache::daemon
