// Demotion, promotion, integrity.
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::SizeIs;

class MovesTest : public CacheFixture {
 protected:
  // A device tier of 8 pages of which 2 are kept free.
  MovesTest() { MakeTiers(/*host_pages=*/8); }
  void MakeTiers(uint64_t host_pages) {
    Config config{.device_pages = 8, .host_pages = host_pages};
    config.options.demote_free_fraction = 0.25;
    Make(config);
  }
  // Modules 1..n of one page, ten seconds apart.
  void PutMany(SessionId session, int n) {
    for (int m = 1; m <= n; ++m) {
      PutFree(session, m);
      clock_.Advance(absl::Seconds(10));
    }
  }
  void FlipByte(const PageRuns& runs) {
    const std::span<std::byte> page =
        pool_->Page(runs[0].segment, runs[0].first_page, kPageBytes);
    page[1234] ^= std::byte{16};
  }
  PageRuns RunsOf(SessionId session, int module) {
    const AcquireResult result = Ask(session, module, 1, /*reserve=*/false);
    EXPECT_EQ(result.modules[0].outcome, Outcome::kHit);
    Release(session, result.lease);
    return result.modules[0].runs;
  }
};

TEST_F(MovesTest, PressureDemotesTheLeastRecentlyUsed) {
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kHost);
  EXPECT_EQ(Info(2).tier, Tier::kDevice);
  EXPECT_EQ(UsedPages(Tier::kDevice), 6u);
  EXPECT_EQ(UsedPages(Tier::kHost), 1u);
  EXPECT_EQ(cache_->Stats().demotions, 1u);
  EXPECT_EQ(StatsOf(Tier::kHost).num_modules, 1u);
}

TEST_F(MovesTest, AHostHitIsReadInPlaceWithTheSameBytes) {
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  const AcquireResult hit = Ask(a, 1);
  EXPECT_EQ(hit.modules[0].outcome, Outcome::kHit);
  EXPECT_EQ(hit.modules[0].tier, Tier::kHost);
  EXPECT_TRUE(Holds(hit.modules[0].runs, 1));
  const PageRun run = hit.modules[0].runs[0];
  EXPECT_EQ(pool_->tier(run.segment), Tier::kHost);
  EXPECT_EQ(pool_->Generation(run.segment, run.first_page),
            hit.modules[0].generation);
}

TEST_F(MovesTest, AHitHostModuleIsPromotedOnceNobodyReadsIt) {
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  const AcquireResult hit = Ask(a, 1);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kHost);
  Release(a, hit.lease);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
  EXPECT_EQ(cache_->Stats().promotions, 1u);
  EXPECT_TRUE(Holds(RunsOf(a, 1), 1));
  // The room it took is made again.
  EXPECT_EQ(Info(2).tier, Tier::kHost);
  EXPECT_EQ(UsedPages(Tier::kDevice), 6u);
}

TEST_F(MovesTest, AFullHostTierEvictsItsOldest) {
  MakeTiers(/*host_pages=*/1);
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kHost);
  PutFree(a, 8);
  RunMover();
  EXPECT_EQ(Info(2).tier, Tier::kHost);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kEvicted);
}

TEST_F(MovesTest, WithoutAHostTierNothingMoves) {
  MakeTiers(/*host_pages=*/0);
  const SessionId a = Open();
  PutMany(a, 8);
  EXPECT_FALSE(mover_->RunOnce());
  EXPECT_EQ(UsedPages(), 8u);
  EXPECT_EQ(cache_->Stats().tiers.size(), 1u);
}

TEST_F(MovesTest, ALeasedHostTierLeavesTheDeviceToEviction) {
  MakeTiers(/*host_pages=*/1);
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  Ask(a, 1);  // leased in the host tier
  PutFree(a, 8);
  RunMover();
  EXPECT_EQ(UsedPages(Tier::kDevice), 7u);
  PutFree(a, 9);
  EXPECT_EQ(AskOne(a, 10).outcome, Outcome::kReserved);
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kEvicted);
}

TEST_F(MovesTest, AHitDuringAMoveReadsTheSourceWhichThenStays) {
  const SessionId a = Open();
  PutMany(a, 7);
  const std::optional<MoveTicket> move = cache_->BeginMove();
  ASSERT_TRUE(move.has_value());
  EXPECT_EQ(Info(1).state, ModuleState::kMoving);
  EXPECT_EQ(StatsOf(Tier::kHost).reserved_bytes, kPageBytes);
  const AcquireResult hit = Ask(a, 1);
  EXPECT_EQ(hit.modules[0].runs, move->source);
  Release(a, hit.lease);  // even when it is over before the copy is
  cache_->EndMove(
      *move, pool_->Copy(move->source, move->destination, move->page_bytes));
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
  EXPECT_EQ(UsedPages(Tier::kHost), 0u);
  EXPECT_EQ(cache_->Stats().demotions, 0u);
  PC_EXPECT_OK(cache_->CheckInvariants());
}

TEST_F(MovesTest, EvictedDuringAMoveIsFreedAtItsEnd) {
  const SessionId a = Open();
  PutMany(a, 7);
  const std::optional<MoveTicket> move = cache_->BeginMove();
  ASSERT_TRUE(move.has_value());
  PC_EXPECT_OK(cache_->Evict({.keys = {KeyOf(1).ToHex()}}));
  PC_EXPECT_OK(cache_->CheckInvariants());
  EXPECT_EQ(UsedPages(Tier::kDevice), 7u);
  cache_->EndMove(*move, move->page_sums);
  EXPECT_EQ(UsedPages(Tier::kDevice), 6u);
  EXPECT_EQ(UsedPages(Tier::kHost), 0u);
}

TEST_F(MovesTest, AFailedCopyLeavesTheModuleWhereItWas) {
  const SessionId a = Open();
  PutMany(a, 7);
  const std::optional<MoveTicket> move = cache_->BeginMove();
  ASSERT_TRUE(move.has_value());
  cache_->EndMove(*move, absl::InternalError("cudaMemcpyAsync: failed"));
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
  EXPECT_EQ(Info(1).state, ModuleState::kCommitted);
  EXPECT_EQ(UsedPages(Tier::kHost), 0u);
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  EXPECT_TRUE(Touch(a, 1));
}

// Of the pages for a copy that failed nobody knows what they hold.
TEST_F(MovesTest, PagesOfAFailedPromotionAreZeroedForTheNext) {
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  ASSERT_EQ(Info(1).tier, Tier::kHost);
  const AcquireResult foreign = Ask(a, 50, 2, /*reserve=*/true, "other");
  ASSERT_EQ(foreign.modules[0].outcome, Outcome::kReserved);
  Fill(foreign.modules[0].runs, 222);
  EXPECT_TRUE(CommitOne(a, foreign.modules[0], 50));
  Release(a, foreign.lease);
  PC_EXPECT_OK(cache_->Evict({.keys = {KeyOf(50).ToHex()}}));
  EXPECT_TRUE(Touch(a, 1));
  const std::optional<MoveTicket> move = cache_->BeginMove();
  ASSERT_TRUE(move.has_value());
  ASSERT_EQ(move->to, Tier::kDevice);
  EXPECT_TRUE(Holds(move->destination, 222));
  cache_->EndMove(*move, absl::InternalError("cudaMemcpyAsync: failed"));
  EXPECT_EQ(AskOne(a, 60, 2).outcome, Outcome::kReserved);
  EXPECT_TRUE(Holds(move->destination, 0));
}

TEST_F(MovesTest, AnUnknownTicketIsIgnored) {
  cache_->EndMove({.id = 777}, std::vector<uint64_t>{});
  EXPECT_EQ(cache_->Stats().demotions, 0u);
}

TEST_F(MovesTest, AMovedModuleHasANewGenerationAndTheOldPagesNone) {
  const SessionId a = Open();
  PutMany(a, 7);
  const AcquireResult before = Ask(a, 1);
  Release(a, before.lease);
  clock_.Advance(absl::Seconds(10));
  for (int m : {2, 3, 4, 5, 6, 7}) Touch(a, m);
  RunMover();
  const AcquireResult after = Ask(a, 1);
  EXPECT_EQ(after.modules[0].tier, Tier::kHost);
  EXPECT_NE(after.modules[0].generation, before.modules[0].generation);
  const PageRun old = before.modules[0].runs[0];
  EXPECT_EQ(pool_->Generation(old.segment, old.first_page), 0u);
}

TEST_F(MovesTest, AFlippedByteIsFoundAtTheMove) {
  const SessionId a = Open();
  PutFree(a, 1);
  FlipByte(RunsOf(a, 1));
  clock_.Advance(absl::Seconds(10));
  for (int m : {2, 3, 4, 5, 6, 7}) PutFree(a, m);
  RunMover();
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.checksum_mismatches, 1u);
  EXPECT_EQ(stats.evictions[static_cast<size_t>(EvictReason::kCorrupt)].count,
            1u);
  EXPECT_EQ(UsedPages(Tier::kHost), 0u);
  // Told, and encoded anew.
  const AcquireResult again = Ask(a, 1);
  EXPECT_EQ(again.modules[0].outcome, Outcome::kReserved);
  EXPECT_EQ(again.modules[0].miss_reason, MissReason::kCorrupt);
  Fill(again.modules[0].runs, 1);
  EXPECT_TRUE(CommitOne(a, again.modules[0], 1));
  EXPECT_TRUE(Touch(a, 1));
}

TEST_F(MovesTest, AFlippedByteIsFoundAtThePromotionToo) {
  const SessionId a = Open();
  PutMany(a, 7);
  RunMover();
  FlipByte(RunsOf(a, 1));  // a hit: asks for its promotion
  RunMover();
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 1u);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kCorrupt);
}

TEST_F(MovesTest, ACorruptModuleInUseIsQuarantinedAndItsReadersNotice) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  CommitOne(a, reserved, 1);
  FlipByte(reserved.runs);
  EXPECT_TRUE(cache_->ReportCorruption(KeyOf(1), reserved.generation));
  EXPECT_EQ(CountIn(ModuleState::kQuarantined), 1u);
  EXPECT_EQ(StatsOf(Tier::kDevice).quarantined_bytes, kPageBytes);
  const PageRun run = reserved.runs[0];
  EXPECT_NE(pool_->Generation(run.segment, run.first_page),
            reserved.generation);
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kCorrupt);
  cache_->CloseSession(a, "done");
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(MovesTest, AFalseReportChangesNothing) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  EXPECT_FALSE(cache_->ReportCorruption(KeyOf(1), reserved.generation));
  CommitOne(a, reserved, 1);
  EXPECT_FALSE(cache_->ReportCorruption(KeyOf(1), reserved.generation));
  EXPECT_FALSE(cache_->ReportCorruption(KeyOf(1), reserved.generation + 1));
  EXPECT_FALSE(cache_->ReportCorruption(KeyOf(99), 1));
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  EXPECT_TRUE(Touch(a, 1));
}

TEST_F(MovesTest, AModuleThatALostReaderHoldsDoesNotMove) {
  const SessionId reader = Open(ProcessId{1}, "r");
  PutMany(Open(), 6);
  AskOne(reader, 1);
  cache_->CloseSession(reader, "lost");
  clock_.Advance(absl::Seconds(10));
  PutFree(Open(), 7);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
  EXPECT_EQ(Info(2).tier, Tier::kHost);
}

TEST_F(MovesTest, PinnedModulesAreNotDemoted) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.pin = true});
  clock_.Advance(absl::Seconds(10));
  for (int m : {2, 3, 4, 5, 6, 7}) PutFree(a, m);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
}

TEST_F(MovesTest, AMoverThreadDoesItAllByItself) {
  const SessionId a = Open();
  mover_->Start();
  PutMany(a, 7);
  // Wakes by the signal, not by the tick: long before this gives up.
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  while (cache_->Stats().demotions == 0 && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  mover_->Stop();
  EXPECT_GE(cache_->Stats().demotions, 1u);
}

}  // namespace
}  // namespace promptcache::daemon
