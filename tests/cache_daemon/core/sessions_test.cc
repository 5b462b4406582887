// How sessions end, what is kept aside then, and single flight.
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using SessionsTest = CacheFixture;
using SingleFlightTest = CacheFixture;

constexpr ProcessId kProcess{1};
constexpr ProcessId kOther{2};

TEST_F(SessionsTest, ALostReservationIsQuarantinedUntilTheProcessIsDead) {
  const SessionId a = Open(kProcess);
  const AcquiredModule reserved = AskOne(a, 1, 3);
  cache_->CloseSession(a, "stream broke");
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, 3 * kPageBytes);
  EXPECT_EQ(CountIn(ModuleState::kQuarantined), 1u);
  EXPECT_EQ(cache_->Stats().num_reservations, 0u);
  clock_.Advance(absl::Hours(1000));  // never by a timeout
  cache_->ExpireDue();
  EXPECT_EQ(UsedPages(), 3u);
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(UsedPages(), 0u);
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, 0u);
}

TEST_F(SessionsTest, QuarantinedPagesAreGivenToNobody) {
  Make({.device_pages = 4});
  const SessionId a = Open(kProcess);
  AskOne(a, 1, 3);
  cache_->CloseSession(a, "stopped");
  const SessionId b = Open(kOther, "w2");
  EXPECT_EQ(AskOne(b, 2, 2).miss_reason, MissReason::kNoMemory);
  EXPECT_EQ(AskOne(b, 3, 1).outcome, Outcome::kReserved);
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(AskOne(b, 2, 2).outcome, Outcome::kReserved);
}

TEST_F(SessionsTest, ALostWriterSeesItsGenerationGo) {
  const SessionId a = Open(kProcess);
  const AcquiredModule reserved = AskOne(a, 1);
  const PageRun run = reserved.runs[0];
  EXPECT_EQ(pool_->Generation(run.segment, run.first_page),
            reserved.generation);
  cache_->CloseSession(a, "lost");
  EXPECT_NE(pool_->Generation(run.segment, run.first_page),
            reserved.generation);
}

TEST_F(SessionsTest, WhatALostReaderLeasedStaysAnAnswer) {
  PutFree(Open(kOther, "w2"), 1);
  const SessionId a = Open(kProcess);
  AskOne(a, 1);
  cache_->CloseSession(a, "lost");
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, 0u);
  EXPECT_EQ(StatsOf(Tier::kDevice).leased_bytes, kPageBytes);
  EXPECT_TRUE(Touch(Open(kOther, "w3"), 1));
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(StatsOf(Tier::kDevice).leased_bytes, 0u);
  EXPECT_TRUE(Touch(Open(kOther, "w4"), 1));
}

TEST_F(SessionsTest, WhatALostReaderLeasedIsNotEvicted) {
  Make({.device_pages = 2});
  const SessionId a = Open(kProcess);
  Put(a, 1, 2);
  cache_->CloseSession(a, "lost");
  const SessionId b = Open(kOther, "w2");
  EXPECT_EQ(AskOne(b, 2).miss_reason, MissReason::kNoMemory);
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(AskOne(b, 2).outcome, Outcome::kReserved);
}

TEST_F(SessionsTest, EvictedUnderALostReaderIsQuarantinedUntilItsDeath) {
  const SessionId a = Open(kProcess);
  Put(a, 1);
  cache_->CloseSession(a, "lost");
  absl::StatusOr<EvictResult> evicted = cache_->Evict({.all = true});
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_deferred, 1u);
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, kPageBytes);
  EXPECT_EQ(WhyMissing(Open(kOther, "w2"), 1), MissReason::kEvicted);
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(SessionsTest, AnEndWithNothingInUseKeepsNothingAside) {
  const SessionId a = Open(kProcess);
  PutFree(a, 1);
  cache_->CloseSession(a, "goodbye");
  EXPECT_EQ(StatsOf(Tier::kDevice).leased_bytes, 0u);
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, 0u);
  EXPECT_EQ(cache_->Stats().num_sessions, 0u);
}

TEST_F(SessionsTest, OfADeadProcessNothingIsKeptAside) {
  const SessionId a = Open(kProcess);
  AskOne(a, 1, 2);
  Put(a, 2);
  cache_->OnProcessDeath(kProcess);  // before the stream is seen to end
  EXPECT_EQ(UsedPages(), 1u);
  EXPECT_EQ(cache_->Stats().num_sessions, 0u);
  EXPECT_EQ(cache_->Stats().num_leases, 0u);
  cache_->CloseSession(a, "stream broke");
  EXPECT_EQ(UsedPages(), 1u);
}

TEST_F(SessionsTest, ADeadProcessOpensNoSession) {
  cache_->OnProcessDeath(kProcess);
  EXPECT_THAT(cache_->OpenSession({.shape = kShape, .process = kProcess}),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("ended")));
}

TEST_F(SessionsTest, ReattachingDeclaresOldViewsDropped) {
  const SessionId a = Open(kProcess, "w");
  AskOne(a, 1, 2);
  Put(a, 2);
  cache_->CloseSession(a, "stream broke");
  EXPECT_EQ(UsedPages(), 3u);
  Open(kProcess, "another client of the process");
  EXPECT_EQ(UsedPages(), 3u);
  Open(kOther, "w");
  EXPECT_EQ(UsedPages(), 3u);
  Open(kProcess, "w");
  EXPECT_EQ(UsedPages(), 1u);
  EXPECT_EQ(StatsOf(Tier::kDevice).leased_bytes, 0u);
}

TEST_F(SessionsTest, AWorkerWithoutANameDeclaresNothing) {
  const SessionId a = Open(kProcess, "");
  AskOne(a, 1);
  cache_->CloseSession(a, "lost");
  Open(kProcess, "");
  EXPECT_EQ(UsedPages(), 1u);
}

TEST_F(SessionsTest, ReattachingSupersedesASessionNotYetSeenToEnd) {
  const SessionId a = Open(kProcess, "w");
  const AcquiredModule reserved = AskOne(a, 1);
  const SessionId b = Open(kProcess, "w");
  EXPECT_EQ(cache_->Stats().num_sessions, 1u);
  EXPECT_EQ(UsedPages(), 0u);
  EXPECT_THAT(cache_->Commit(a, {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("")));
  EXPECT_FALSE(CommitOne(b, reserved, 1));
}

TEST_F(SessionsTest, InProcessCallersHoldNothingAfterTheirSession) {
  const SessionId a = Open();
  AskOne(a, 1, 2);
  Put(a, 2);
  cache_->CloseSession(a, "done");
  EXPECT_EQ(UsedPages(), 1u);
  EXPECT_EQ(StatsOf(Tier::kDevice).leased_bytes, 0u);
}

TEST_F(SingleFlightTest, WaitersHitWhenTheHolderCommits) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  const SessionId b = Open();
  EXPECT_EQ(Ask(b, 1, 2, true, "default", 31).modules[0].outcome,
            Outcome::kPending);
  EXPECT_EQ(Ask(b, 1, 2, false, "default", 32).modules[0].outcome,
            Outcome::kPending);
  EXPECT_THAT(resolved_, IsEmpty());
  CommitOne(a, reserved, 1);
  ASSERT_THAT(resolved_, SizeIs(2));
  EXPECT_EQ(resolved_[0].request_id, 31u);
  EXPECT_EQ(resolved_[1].request_id, 32u);
  EXPECT_EQ(resolved_[1].module.outcome, Outcome::kHit);
  EXPECT_EQ(resolved_[1].module.runs, reserved.runs);
  EXPECT_NE(resolved_[0].lease, resolved_[1].lease);
  EXPECT_EQ(Info(1).num_leases, 3u);
  Release(b, resolved_[0].lease);
  Release(b, resolved_[1].lease);
  EXPECT_EQ(Info(1).num_leases, 1u);
}

TEST_F(SingleFlightTest, AnAbortPassesTheReservationOnInOrder) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  const SessionId b = Open();
  const SessionId c = Open();
  Ask(b, 1, 1, true, "default", 1);
  Ask(c, 1, 1, true, "default", 2);
  PC_EXPECT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  ASSERT_THAT(resolved_, SizeIs(1));
  EXPECT_EQ(resolved_[0].request_id, 1u);
  EXPECT_EQ(resolved_[0].module.outcome, Outcome::kReserved);
  EXPECT_NE(resolved_[0].module.generation, reserved.generation);
  EXPECT_FALSE(CommitOne(a, reserved, 1));
  EXPECT_TRUE(CommitOne(b, resolved_[0].module, 1));
  ASSERT_THAT(resolved_, SizeIs(2));
  EXPECT_EQ(resolved_[1].request_id, 2u);
  EXPECT_EQ(resolved_[1].module.outcome, Outcome::kHit);
  // The heir's commit is leased under the lease that it was given.
  Release(b, resolved_[0].lease);
  Release(c, resolved_[1].lease);
  EXPECT_EQ(Info(1).num_leases, 0u);
}

TEST_F(SingleFlightTest, ReadersAreSkippedAndWaitForTheNextHolder) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  const SessionId b = Open();
  Ask(b, 1, 1, /*reserve=*/false, "default", 1);
  Ask(b, 1, 1, /*reserve=*/true, "default", 2);
  PC_EXPECT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  ASSERT_THAT(resolved_, SizeIs(1));
  EXPECT_EQ(resolved_[0].request_id, 2u);
  CommitOne(b, resolved_[0].module, 1);
  EXPECT_EQ(resolved_[1].request_id, 1u);
  EXPECT_EQ(resolved_[1].module.outcome, Outcome::kHit);
}

TEST_F(SingleFlightTest, WithoutAWriterReadersAreToldWhyItIsMissing) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  Ask(Open(), 1, 1, /*reserve=*/false);
  PC_EXPECT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  ASSERT_THAT(resolved_, SizeIs(1));
  EXPECT_EQ(resolved_[0].module.outcome, Outcome::kMiss);
  EXPECT_EQ(resolved_[0].module.miss_reason, MissReason::kNeverSeen);
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(SingleFlightTest, ALostHoldersHeirWritesOtherPages) {
  const SessionId a = Open(kProcess);
  const AcquiredModule reserved = AskOne(a, 1, 2);
  const SessionId b = Open(kOther, "w2");
  Ask(b, 1, 2);
  cache_->CloseSession(a, "lost");
  ASSERT_THAT(resolved_, SizeIs(1));
  EXPECT_EQ(resolved_[0].module.outcome, Outcome::kReserved);
  EXPECT_NE(resolved_[0].module.runs, reserved.runs);
  EXPECT_EQ(UsedPages(), 4u);
  EXPECT_TRUE(CommitOne(b, resolved_[0].module, 1));
  cache_->OnProcessDeath(kProcess);
  EXPECT_EQ(UsedPages(), 2u);
}

TEST_F(SingleFlightTest, ALostHolderInAFullTierLeavesEveryWaiterAMiss) {
  Make({.device_pages = 2});
  const SessionId a = Open(kProcess);
  AskOne(a, 1, 2);
  const SessionId b = Open(kOther, "w2");
  Ask(b, 1, 2);
  Ask(b, 1, 2);
  cache_->CloseSession(a, "lost");
  ASSERT_THAT(resolved_, SizeIs(2));
  EXPECT_EQ(resolved_[0].module.miss_reason, MissReason::kNoMemory);
  EXPECT_EQ(resolved_[1].module.miss_reason, MissReason::kNoMemory);
}

TEST_F(SingleFlightTest, WaitersOfEndedSessionsAreForgotten) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  const SessionId b = Open();
  Ask(b, 1);
  cache_->CloseSession(b, "done");
  CommitOne(a, reserved, 1);
  EXPECT_THAT(resolved_, IsEmpty());
  EXPECT_EQ(Info(1).num_leases, 1u);
}

TEST_F(SingleFlightTest, TheHoldersOwnWaiterInheritsNothingWhenItEnds) {
  const SessionId a = Open();
  AskOne(a, 1);
  AskOne(a, 1);  // another request of the same session
  cache_->CloseSession(a, "done");
  EXPECT_THAT(resolved_, IsEmpty());
  EXPECT_EQ(UsedPages(), 0u);
}

}  // namespace
}  // namespace promptcache::daemon
