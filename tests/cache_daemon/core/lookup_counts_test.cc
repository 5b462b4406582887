// What an Acquire's purpose makes of it in the statistics.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

// Modules of two pages: 32 tokens.
class LookupCountsTest : public CacheFixture {
 protected:
  AcquireResult AskFor(SessionId session, int module, AcquirePurpose purpose,
                       bool reserve = true, bool no_wait = false) {
    const AcquireKey key{.key = KeyOf(module), .num_tokens = 32};
    absl::StatusOr<AcquireResult> result =
        cache_->Acquire(session, {.keys = {&key, 1},
                                  .reserve_missing = reserve,
                                  .purpose = purpose,
                                  .no_wait = no_wait});
    EXPECT_THAT(result, IsOk());
    return result.ok() ? *result : AcquireResult{};
  }
  uint64_t Misses(MissReason reason) {
    return cache_->Stats().misses[static_cast<size_t>(reason)].count;
  }
  // Lookups and tokens agree, since all modules are alike.
  void ExpectCounts(uint64_t hits, uint64_t misses, uint64_t missed_probes) {
    const CacheStats stats = cache_->Stats();
    EXPECT_EQ(stats.hit_lookups, hits);
    EXPECT_EQ(stats.hit_tokens, 32 * hits);
    EXPECT_EQ(StatsOf(Tier::kDevice).hits.count, hits);
    EXPECT_EQ(stats.miss_lookups, misses);
    EXPECT_EQ(stats.miss_tokens, 32 * misses);
    EXPECT_EQ(stats.missed_probes.count, missed_probes);
    EXPECT_EQ(stats.missed_probes.volume, 32 * missed_probes);
    uint64_t with_reason = 0;
    for (const Counted& counted : stats.misses) with_reason += counted.count;
    EXPECT_EQ(with_reason, misses);
  }
};

TEST_F(LookupCountsTest, ARequestsLookupsAreHitsAndMisses) {
  const SessionId a = Open();
  const AcquireResult missed = AskFor(a, 1, AcquirePurpose::kRequest);
  CommitOne(a, missed.modules[0], 1);
  AskFor(a, 1, AcquirePurpose::kRequest);
  ExpectCounts(/*hits=*/1, /*misses=*/1, /*missed_probes=*/0);
  EXPECT_EQ(Info(1).hits, 1u);
}

TEST_F(LookupCountsTest, WhatAProbeDoesNotFindIsNoMiss) {
  const SessionId a = Open();
  AskFor(a, 1, AcquirePurpose::kProbe, /*reserve=*/false);
  AskFor(a, 2, AcquirePurpose::kProbe, /*reserve=*/false);
  ExpectCounts(/*hits=*/0, /*misses=*/0, /*missed_probes=*/2);
}

TEST_F(LookupCountsTest, WhatAProbeFindsIsAHit) {
  const SessionId a = Open();
  PutFree(a, 1, 2);  // a request's miss
  AskFor(a, 1, AcquirePurpose::kProbe, /*reserve=*/false);
  ExpectCounts(/*hits=*/1, /*misses=*/1, /*missed_probes=*/0);
  EXPECT_EQ(Info(1).hits, 1u);
}

TEST_F(LookupCountsTest, KeepingAndAskingAgainCountNothing) {
  const SessionId a = Open();
  for (const AcquirePurpose purpose :
       {AcquirePurpose::kKeep, AcquirePurpose::kAgain}) {
    const int module = 1 + static_cast<int>(purpose);
    const AcquireResult missed = AskFor(a, module, purpose);
    CommitOne(a, missed.modules[0], module);
    EXPECT_EQ(AskFor(a, module, purpose).modules[0].outcome, Outcome::kHit);
    EXPECT_EQ(Info(module).hits, 0u);
  }
  ExpectCounts(/*hits=*/0, /*misses=*/0, /*missed_probes=*/0);
}

TEST_F(LookupCountsTest, APendingLookupThatIsCommittedIsAHit) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  AskFor(Open(), 1, AcquirePurpose::kRequest);
  ExpectCounts(/*hits=*/0, /*misses=*/1, /*missed_probes=*/0);
  CommitOne(a, reserved, 1);
  ExpectCounts(/*hits=*/1, /*misses=*/1, /*missed_probes=*/0);
  EXPECT_EQ(Info(1).hits, 1u);
}

TEST_F(LookupCountsTest, AReservationThatPassesOnIsAMissOfItsHeir) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  AskFor(Open(), 1, AcquirePurpose::kRequest);
  PC_ASSERT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  ExpectCounts(/*hits=*/0, /*misses=*/2, /*missed_probes=*/0);
  EXPECT_EQ(Misses(MissReason::kNotYetCommitted), 1u);
}

TEST_F(LookupCountsTest, APendingLookupThatComesToNothingIsAMiss) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  AskFor(Open(), 1, AcquirePurpose::kRequest, /*reserve=*/false);
  AskFor(Open(), 1, AcquirePurpose::kProbe, /*reserve=*/false);
  PC_ASSERT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  ExpectCounts(/*hits=*/0, /*misses=*/2, /*missed_probes=*/1);
}

TEST_F(LookupCountsTest, WhatALostHolderLeavesIsAMiss) {
  const SessionId a = Open();
  AskOne(a, 1, 2);
  AskFor(Open(), 1, AcquirePurpose::kRequest, /*reserve=*/false);
  cache_->CloseSession(a, "lost");
  ExpectCounts(/*hits=*/0, /*misses=*/2, /*missed_probes=*/0);
}

TEST_F(LookupCountsTest, AWaiterThatHasGoneIsNotCounted) {
  const SessionId a = Open();
  const SessionId b = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  AskFor(b, 1, AcquirePurpose::kRequest);
  cache_->CloseSession(b, "gone");
  CommitOne(a, reserved, 1);
  ExpectCounts(/*hits=*/0, /*misses=*/1, /*missed_probes=*/0);
}

TEST_F(LookupCountsTest, WhoDoesNotWaitMissesAtOnceAndIsToldNoMore) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  const AcquiredModule missed =
      AskFor(Open(), 1, AcquirePurpose::kRequest, /*reserve=*/true,
             /*no_wait=*/true)
          .modules[0];
  EXPECT_EQ(missed.outcome, Outcome::kMiss);
  EXPECT_EQ(missed.miss_reason, MissReason::kNotYetCommitted);
  CommitOne(a, reserved, 1);
  EXPECT_THAT(resolved_, ::testing::IsEmpty());
  ExpectCounts(/*hits=*/0, /*misses=*/2, /*missed_probes=*/0);
}

}  // namespace
}  // namespace promptcache::daemon
