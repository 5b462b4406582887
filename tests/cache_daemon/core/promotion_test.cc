// Promotion on a hit: what is read while it arrives.
#include <optional>
#include <vector>

#include "common/progress_word.h"
#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

constexpr PageShape kLayers{
    .page_bytes = kPageBytes, .page_tokens = 16, .num_layers = 4};

class PromotionTest : public CacheFixture {
 protected:
  // A device tier of 8 pages of which 2 are kept free; module 1, of one page,
  // is in the host tier, 2 to 7 on the device.
  PromotionTest() {
    Config config{.device_pages = 8, .host_pages = 8};
    config.options.demote_free_fraction = 0.25;
    Make(config);
    reader_ = OpenReader();
    for (int m = 1; m <= 7; ++m) {
      PutFree(reader_, m);
      clock_.Advance(absl::Seconds(10));
    }
    RunMover();
    EXPECT_EQ(Info(1).tier, Tier::kHost);
  }
  SessionId OpenReader(ProcessId process = ProcessId{}) {
    return Open(process, "r", kLayers, /*device=*/0, /*reads_arriving=*/true);
  }
  std::optional<uint64_t> StateOf(const AcquiredModule& hit) {
    return ProgressState(pool_->Progress(hit.progress_word), hit.generation);
  }
  bool GenerationHolds(const AcquiredModule& hit) {
    const PageRun run = hit.runs[0];
    return pool_->Generation(run.segment, run.first_page) == hit.generation;
  }
  absl::StatusOr<std::vector<uint64_t>> CopyOf(const ArrivalTicket& ticket) {
    return pool_->CopyByLayers(ticket.source, ticket.destination, ticket.shape,
                               [](uint32_t) {});
  }

  SessionId reader_{};
};

TEST_F(PromotionTest, AHitHasDevicePagesAtOnceAndAWordToWaitFor) {
  const AcquiredModule hit = AskOne(reader_, 1);
  EXPECT_EQ(hit.outcome, Outcome::kHit);
  EXPECT_EQ(hit.tier, Tier::kDevice);
  EXPECT_EQ(pool_->tier(hit.runs[0].segment), Tier::kDevice);
  EXPECT_NE(hit.progress_word, 0u);
  EXPECT_EQ(StateOf(hit), 0u);
  EXPECT_TRUE(GenerationHolds(hit));
  EXPECT_EQ(Info(1).state, ModuleState::kMoving);
  EXPECT_EQ(StatsOf(Tier::kHost).reserved_bytes, kPageBytes);
  PC_EXPECT_OK(cache_->CheckInvariants());
}

TEST_F(PromotionTest, ItsBytesArriveAreVerifiedAndTheHostPagesGoBack) {
  const AcquiredModule hit = AskOne(reader_, 1);
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_EQ(StateOf(hit), kProgressVerified);
  EXPECT_TRUE(GenerationHolds(hit));
  EXPECT_TRUE(Holds(hit.runs, 1));
  EXPECT_EQ(StatsOf(Tier::kHost).used_bytes, 0u);
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.promotions, 1u);
  EXPECT_EQ(stats.promotions_on_hit, 1u);
  EXPECT_EQ(AskOne(reader_, 1).progress_word, 0u);
}

TEST_F(PromotionTest, TheMoverTellsLayersAsTheyCome) {
  AskOne(reader_, 1);
  const auto ticket = cache_->BeginArrival();
  ASSERT_TRUE(ticket.has_value());
  std::vector<uint32_t> told;
  const auto sums =
      pool_->CopyByLayers(ticket->source, ticket->destination, ticket->shape,
                          [&](uint32_t layers) { told.push_back(layers); });
  // Small: all in one group.
  EXPECT_THAT(told, ::testing::ElementsAre(4u));
  cache_->EndArrival(*ticket, sums);
  EXPECT_FALSE(cache_->BeginArrival().has_value());
}

TEST_F(PromotionTest, TheHitCountsWhereTheModuleWas) {
  const uint64_t before = StatsOf(Tier::kHost).hits.count;
  AskOne(reader_, 1);
  EXPECT_EQ(StatsOf(Tier::kHost).hits.count, before + 1);
}

TEST_F(PromotionTest, OtherReadersWaitForTheSameWord) {
  const AcquiredModule first = AskOne(reader_, 1);
  const AcquiredModule second = AskOne(OpenReader(), 1);
  EXPECT_EQ(second.progress_word, first.progress_word);
  EXPECT_EQ(second.generation, first.generation);
  EXPECT_EQ(second.runs, first.runs);
}

TEST_F(PromotionTest, WhoCannotWaitIsNotGivenWhatArrives) {
  const SessionId other = Open(ProcessId{}, "w", kLayers);
  const AcquiredModule hit = AskOne(reader_, 1);
  EXPECT_EQ(WhyMissing(other, 1), MissReason::kNotYetCommitted);
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_TRUE(Touch(other, 1));
  EXPECT_TRUE(Holds(hit.runs, 1));
}

TEST_F(PromotionTest, PagesThatOthersReadInTheHostTierStayThere) {
  const SessionId other = Open(ProcessId{}, "w", kLayers);
  const AcquireResult in_host = Ask(other, 1);
  EXPECT_EQ(in_host.modules[0].tier, Tier::kHost);
  EXPECT_EQ(AskOne(reader_, 1).tier, Tier::kHost);
  EXPECT_TRUE(GenerationHolds(in_host.modules[0]));
}

TEST_F(PromotionTest, WithoutFreePagesItIsReadWhereItIs) {
  PutFree(reader_, 8);
  PutFree(reader_, 9);
  const AcquireResult hit = Ask(reader_, 1);
  EXPECT_EQ(hit.modules[0].tier, Tier::kHost);
  EXPECT_EQ(hit.modules[0].progress_word, 0u);
  // Nobody was lost for it, and it comes up later as always.
  EXPECT_EQ(UsedPages(Tier::kDevice), 8u);
  Release(reader_, hit.lease);
  RunMover();
  EXPECT_EQ(Info(1).tier, Tier::kDevice);
  EXPECT_EQ(cache_->Stats().promotions_on_hit, 0u);
}

TEST_F(PromotionTest, AFailedCopyHidesTheModuleAndItsReadersNotice) {
  const AcquiredModule hit = AskOne(reader_, 1);
  const auto ticket = cache_->BeginArrival();
  ASSERT_TRUE(ticket.has_value());
  cache_->EndArrival(*ticket, absl::InternalError("cudaMemcpy2DAsync: failed"));
  EXPECT_EQ(StateOf(hit), kProgressFailed);
  EXPECT_FALSE(GenerationHolds(hit));
  EXPECT_EQ(WhyMissing(reader_, 1), MissReason::kCorrupt);
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.checksum_mismatches, 0u);
  EXPECT_EQ(stats.promotions, 0u);
  EXPECT_EQ(StatsOf(Tier::kHost).used_bytes, 0u);
  EXPECT_EQ(CountIn(ModuleState::kQuarantined), 1u);
}

TEST_F(PromotionTest, WrongSumsAreFoundBeforeAnybodyCountsOnThem) {
  const AcquiredModule hit = AskOne(reader_, 1);
  const auto ticket = cache_->BeginArrival();
  ASSERT_TRUE(ticket.has_value());
  const PageRun run = ticket->source[0];
  pool_->Page(run.segment, run.first_page, kPageBytes)[99] ^= std::byte{1};
  cache_->EndArrival(*ticket, CopyOf(*ticket));
  EXPECT_EQ(StateOf(hit), kProgressFailed);
  EXPECT_FALSE(GenerationHolds(hit));
  EXPECT_EQ(cache_->Stats().checksum_mismatches, 1u);
  EXPECT_EQ(WhyMissing(reader_, 1), MissReason::kCorrupt);
}

TEST_F(PromotionTest, EvictedWhileItArrivesItIsFreedAtTheEnd) {
  const AcquireResult hit = Ask(reader_, 1);
  PC_EXPECT_OK(cache_->Evict({.keys = {KeyOf(1).ToHex()}}));
  PC_EXPECT_OK(cache_->CheckInvariants());
  Release(reader_, hit.lease);
  EXPECT_EQ(UsedPages(Tier::kDevice), 7u);
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_EQ(StateOf(hit.modules[0]), kProgressVerified);
  EXPECT_EQ(UsedPages(Tier::kDevice), 6u);
  EXPECT_EQ(UsedPages(Tier::kHost), 0u);
}

TEST_F(PromotionTest, EvictedAndFailedItsReadersNoticeToo) {
  const AcquireResult hit = Ask(reader_, 1);
  PC_EXPECT_OK(cache_->Evict({.keys = {KeyOf(1).ToHex()}}));
  const auto ticket = cache_->BeginArrival();
  cache_->EndArrival(*ticket, absl::InternalError("failed"));
  EXPECT_FALSE(GenerationHolds(hit.modules[0]));
  PC_EXPECT_OK(cache_->CheckInvariants());
  Release(reader_, hit.lease);
  EXPECT_EQ(UsedPages(Tier::kDevice), 6u);
}

TEST_F(PromotionTest, ALostReadersModuleArrivesAllTheSame) {
  const SessionId lost = OpenReader(ProcessId{1});
  const AcquiredModule hit = AskOne(lost, 1);
  cache_->CloseSession(lost, "lost");
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_TRUE(Holds(hit.runs, 1));
  EXPECT_TRUE(Touch(reader_, 1));
  cache_->OnProcessDeath(ProcessId{1});
  EXPECT_EQ(Info(1).state, ModuleState::kCommitted);
}

TEST_F(PromotionTest, AReportOfWhatArrivesIsNoEvidence) {
  const AcquiredModule hit = AskOne(reader_, 1);
  EXPECT_FALSE(cache_->ReportCorruption(KeyOf(1), hit.generation));
  EXPECT_TRUE(mover_->RunOnce());
  EXPECT_TRUE(Touch(reader_, 1));
}

TEST_F(PromotionTest, AWordServesTheNextOneAndMisleadsNoEarlierReader) {
  const AcquiredModule first = AskOne(reader_, 1);
  EXPECT_TRUE(mover_->RunOnce());
  // Promoting 1 has demoted 2.
  RunMover();
  ASSERT_EQ(Info(2).tier, Tier::kHost);
  const AcquiredModule second = AskOne(reader_, 2);
  EXPECT_EQ(second.progress_word, first.progress_word);
  EXPECT_EQ(StateOf(second), 0u);
  EXPECT_EQ(StateOf(first), std::nullopt);
  EXPECT_TRUE(GenerationHolds(first));
}

// What was on its way to nobody's pages must not show there later.
TEST_F(PromotionTest, PagesOfAnotherDomainAreZeroedWhenNothingCame) {
  const AcquireResult foreign = Ask(reader_, 50, 2, /*reserve=*/true, "other");
  ASSERT_EQ(foreign.modules[0].outcome, Outcome::kReserved);
  Fill(foreign.modules[0].runs, 222);
  EXPECT_TRUE(CommitOne(reader_, foreign.modules[0], 50));
  Release(reader_, foreign.lease);
  PC_EXPECT_OK(cache_->Evict({.keys = {KeyOf(50).ToHex()}}));
  const auto [lease, modules] = Ask(reader_, 1);
  const AcquiredModule& hit = modules[0];
  ASSERT_NE(hit.progress_word, 0u);
  EXPECT_TRUE(Holds(hit.runs, 222));
  cache_->EndArrival(*cache_->BeginArrival(), absl::InternalError("failed"));
  Release(reader_, lease);
  // Whoever gets the page next, of the module's own domain too.
  const uint64_t free_pages = 8 - UsedPages();
  EXPECT_EQ(AskOne(reader_, 60, static_cast<uint32_t>(free_pages)).outcome,
            Outcome::kReserved);
  EXPECT_TRUE(Holds(hit.runs, 0));
}

TEST_F(PromotionTest, StoppingTheMoverFailsWhatNobodyBegan) {
  mover_->Start();
  mover_->Stop();
  const AcquiredModule hit = AskOne(reader_, 1);
  mover_->Start();
  mover_->Stop();
  const std::optional<uint64_t> state = StateOf(hit);
  EXPECT_TRUE(state == kProgressFailed || state == kProgressVerified);
  EXPECT_EQ(GenerationHolds(hit), state == kProgressVerified);
}

TEST_F(PromotionTest, AMoverThreadWakesForIt) {
  mover_->Start();
  const AcquiredModule hit = AskOne(reader_, 1);
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  while (StateOf(hit) != kProgressVerified && absl::Now() < give_up) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  mover_->Stop();
  EXPECT_EQ(StateOf(hit), kProgressVerified);
  EXPECT_TRUE(Holds(hit.runs, 1));
}

TEST(ProgressWordTest, CarriesTheGenerationsLowBits) {
  const uint64_t generation = (uint64_t{5} << 48) + 77;
  EXPECT_EQ(ProgressState(ProgressWord(generation, 3), generation), 3u);
  EXPECT_EQ(
      ProgressState(ProgressWord(generation, kProgressVerified), generation),
      kProgressVerified);
  EXPECT_EQ(ProgressState(ProgressWord(generation, 3), generation + 1),
            std::nullopt);
  EXPECT_EQ(ProgressState(0, generation), std::nullopt);
}

}  // namespace
}  // namespace promptcache::daemon
