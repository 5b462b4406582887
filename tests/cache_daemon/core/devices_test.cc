// Several devices, each with a tier of its own, and one host tier for all.
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DevicesTest : public CacheFixture {
 protected:
  // Two devices of 8 pages, of each of which 2 are kept free, and a host tier.
  DevicesTest() { MakeDevices(/*host_pages=*/8); }
  void MakeDevices(uint64_t host_pages) {
    Config config{
        .num_devices = 2, .device_pages = 8, .host_pages = host_pages};
    config.options.demote_free_fraction = 0.25;
    config.options.pin_budget_bytes = 3 * kPageBytes;
    Make(config);
    a_ = OpenOn(0);
    b_ = OpenOn(1);
  }
  // Modules first..last of one page, ten seconds apart.
  void PutMany(SessionId session, int first, int last) {
    for (int m = first; m <= last; ++m) {
      PutFree(session, m);
      clock_.Advance(absl::Seconds(10));
    }
  }
  // "0", "1", "host": where copies of the module are.
  std::vector<std::string> PlacesOf(int module) {
    std::vector<std::string> places;
    for (const Placement& placement : Info(module).placements) {
      places.push_back(placement.tier == Tier::kHost
                           ? "host"
                           : absl::StrCat(placement.device));
    }
    return places;
  }
  uint64_t Misses(MissReason reason) {
    return cache_->Stats().misses[static_cast<size_t>(reason)].count;
  }

  SessionId a_{};  // on device 0
  SessionId b_{};  // on device 1
};

TEST_F(DevicesTest, SegmentIdsAreUniqueOverAllTiers) {
  EXPECT_EQ(pool_->num_devices(), 2u);
  std::vector<std::string> places;
  for (uint32_t i = 0; i < pool_->num_segments(); ++i) {
    places.push_back(pool_->tier(i) == Tier::kHost
                         ? "host"
                         : absl::StrCat(pool_->device(i)));
  }
  EXPECT_THAT(places, ElementsAre("0", "1", "host"));
  EXPECT_EQ(pool_->tier_bytes(Tier::kDevice, 1), 8 * kPageBytes);
}

TEST_F(DevicesTest, AnotherDevicesModuleIsAMissWithAReasonOfItsOwn) {
  PutFree(a_, 1);
  const AcquireResult asked = Ask(b_, 1);
  EXPECT_EQ(asked.modules[0].outcome, Outcome::kReserved);
  EXPECT_EQ(asked.modules[0].miss_reason, MissReason::kOnOtherDevice);
  EXPECT_EQ(Misses(MissReason::kOnOtherDevice), 1u);
  EXPECT_EQ(Misses(MissReason::kNeverSeen), 1u);  // the first one
  EXPECT_EQ(pool_->device(asked.modules[0].runs[0].segment), 1u);
  Fill(asked.modules[0].runs, 1);
  EXPECT_TRUE(CommitOne(b_, asked.modules[0], 1));
  EXPECT_THAT(PlacesOf(1), ElementsAre("0", "1"));
  for (const auto& [session, device] : {std::pair{a_, 0u}, std::pair{b_, 1u}}) {
    const AcquireResult hit = Ask(session, 1);
    EXPECT_EQ(hit.modules[0].outcome, Outcome::kHit);
    EXPECT_EQ(pool_->device(hit.modules[0].runs[0].segment), device);
    EXPECT_EQ(StatsOf(Tier::kDevice, device).hits.count, 1u);
  }
}

TEST_F(DevicesTest, OnlySessionsOfOneDeviceWaitForEachOther) {
  const AcquiredModule first = AskOne(a_, 1);
  EXPECT_EQ(AskOne(OpenOn(0), 1).outcome, Outcome::kPending);
  const AcquiredModule other = AskOne(b_, 1);
  EXPECT_EQ(other.outcome, Outcome::kReserved);
  EXPECT_EQ(other.miss_reason, MissReason::kNeverSeen);
  EXPECT_TRUE(CommitOne(b_, other, 1));
  EXPECT_THAT(resolved_, IsEmpty());
  EXPECT_TRUE(CommitOne(a_, first, 1));
  ASSERT_EQ(resolved_.size(), 1u);
  EXPECT_EQ(resolved_[0].module.runs, first.runs);
}

TEST_F(DevicesTest, WhatOneDeviceDemotedAllHit) {
  PutMany(a_, 1, 7);
  RunMover();
  EXPECT_THAT(PlacesOf(1), ElementsAre("host"));
  for (const SessionId session : {a_, b_}) {
    const AcquireResult hit = Ask(session, 1);
    EXPECT_EQ(hit.modules[0].outcome, Outcome::kHit);
    EXPECT_EQ(hit.modules[0].tier, Tier::kHost);
    EXPECT_TRUE(Holds(hit.modules[0].runs, 1));
  }
  EXPECT_EQ(StatsOf(Tier::kHost).hits.count, 2u);
  EXPECT_EQ(UsedPages(Tier::kDevice, 1), 0u);
}

TEST_F(DevicesTest, PromotionGoesToTheDeviceThatHitIt) {
  PutMany(a_, 1, 7);
  RunMover();
  EXPECT_TRUE(Touch(b_, 1));
  RunMover();
  EXPECT_THAT(PlacesOf(1), ElementsAre("1"));
  const AcquireResult hit = Ask(b_, 1);
  EXPECT_EQ(hit.modules[0].tier, Tier::kDevice);
  EXPECT_TRUE(Holds(hit.modules[0].runs, 1));
  EXPECT_EQ(UsedPages(Tier::kDevice, 0), 6u);
  EXPECT_EQ(cache_->Stats().promotions, 1u);
}

TEST_F(DevicesTest, DemotingWhatTheHostHasDropsTheCopy) {
  PutMany(a_, 1, 6);
  PutMany(b_, 1, 7);
  RunMover();  // b's 1
  EXPECT_THAT(PlacesOf(1), ElementsAre("0", "host"));
  const uint64_t hits = Info(1).hits;
  PutMany(a_, 7, 7);
  RunMover();  // a's 1: the host has it
  EXPECT_THAT(PlacesOf(1), ElementsAre("host"));
  EXPECT_EQ(Info(1).hits, hits);
  EXPECT_EQ(UsedPages(Tier::kHost), 1u);
  EXPECT_EQ(UsedPages(Tier::kDevice, 0), 6u);
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.demotions, 2u);
  EXPECT_EQ(stats.evictions[static_cast<size_t>(EvictReason::kCapacity)].count,
            0u);
  EXPECT_TRUE(Touch(a_, 1));
}

TEST_F(DevicesTest, PressureOfAnAcquireDropsWhatTheHostHas) {
  PutMany(a_, 1, 6);
  PutMany(b_, 1, 7);
  RunMover();
  PutMany(a_, 8, 9);
  EXPECT_EQ(AskOne(a_, 10).outcome, Outcome::kReserved);
  EXPECT_THAT(PlacesOf(1), ElementsAre("host"));
  EXPECT_EQ(cache_->Stats().demotions, 2u);
  EXPECT_EQ(AskOne(a_, 11).outcome, Outcome::kReserved);
  EXPECT_EQ(StatsOf(Tier::kDevice, 0)
                .evictions[static_cast<size_t>(EvictReason::kCapacity)]
                .count,
            1u);
}

TEST_F(DevicesTest, OfTwoCopiesOnTheirWayToTheHostTheFirstStays) {
  PutMany(a_, 1, 7);
  PutMany(b_, 1, 7);
  const std::optional<MoveTicket> of_a = cache_->BeginMove(0);
  const std::optional<MoveTicket> of_b = cache_->BeginMove(1);
  ASSERT_TRUE(of_a.has_value() && of_b.has_value());
  EXPECT_EQ(of_a->key, of_b->key);
  for (const MoveTicket& move : {*of_b, *of_a}) {
    cache_->EndMove(
        move, pool_->Copy(move.source, move.destination, move.page_bytes));
    PC_EXPECT_OK(cache_->CheckInvariants());
  }
  EXPECT_THAT(PlacesOf(1), ElementsAre("host"));
  EXPECT_EQ(UsedPages(Tier::kHost), 1u);
  EXPECT_EQ(cache_->Stats().demotions, 2u);
}

TEST_F(DevicesTest, ACopyThatGoesLeavesTheKeyKnownOnce) {
  PutFree(a_, 1);
  PutFree(b_, 1);
  const AcquireResult mine = Ask(a_, 1);
  const PageRun run = mine.modules[0].runs[0];
  pool_->Page(run.segment, run.first_page, kPageBytes)[7] ^= std::byte{1};
  EXPECT_TRUE(cache_->ReportCorruption(KeyOf(1), mine.modules[0].generation));
  EXPECT_THAT(PlacesOf(1), ElementsAre("1"));
  EXPECT_EQ(Info(1).absence, MissReason::kNone);
  EXPECT_EQ(WhyMissing(a_, 1), MissReason::kOnOtherDevice);
  EXPECT_TRUE(Touch(b_, 1));
  PC_EXPECT_OK(cache_->Evict({.all = true}));
  EXPECT_THAT(PlacesOf(1), IsEmpty());
  EXPECT_EQ(WhyMissing(a_, 1), MissReason::kEvicted);
}

TEST_F(DevicesTest, AnotherDomainLearnsNothingOfAnotherDevicesModule) {
  PutFree(a_, 1);
  const AcquireResult forged = Ask(b_, 1, 1, /*reserve=*/true, "t2");
  EXPECT_EQ(forged.modules[0].outcome, Outcome::kMiss);
  EXPECT_EQ(forged.modules[0].miss_reason, MissReason::kNeverSeen);
}

TEST_F(DevicesTest, OperatorsActOnAllCopies) {
  PutFree(a_, 1);
  PutFree(b_, 1);
  const ModuleFilter one{.keys = {KeyOf(1).ToHex()}};
  auto pinned = cache_->Pin(one, /*pin=*/true);
  PC_ASSERT_OK(pinned);
  EXPECT_EQ(pinned->num_changed, 1u);
  EXPECT_EQ(pinned->pinned_bytes, 2 * kPageBytes);
  for (uint32_t device : {0u, 1u}) {
    EXPECT_EQ(StatsOf(Tier::kDevice, device).pinned_bytes, kPageBytes);
  }
  const auto listed = cache_->List({});
  PC_ASSERT_OK(listed);
  ASSERT_EQ(listed->modules.size(), 1u);
  EXPECT_EQ(listed->modules[0].placements.size(), 2u);
  EXPECT_TRUE(listed->modules[0].pinned);
  const auto evicted = cache_->Evict(one);
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_evicted, 1u);
  EXPECT_EQ(evicted->bytes, 2 * kPageBytes);
  EXPECT_EQ(cache_->Stats().pinned_bytes, 0u);
}

TEST_F(DevicesTest, AKeyIsPinnedWithAllItsCopiesOrNot) {
  for (const SessionId session : {a_, b_}) PutFree(session, 1, 2);
  const ModuleFilter one{.keys = {KeyOf(1).ToHex()}};
  auto pinned = cache_->Pin(one, /*pin=*/true);  // 4 pages, 3 may be
  PC_ASSERT_OK(pinned);
  EXPECT_EQ(pinned->num_refused, 1u);
  EXPECT_EQ(pinned->pinned_bytes, 0u);
}

TEST_F(DevicesTest, ACopyOfAPinnedModuleIsPinned) {
  PutFree(a_, 1, 1, {.pin = true});
  PutFree(b_, 1);
  EXPECT_EQ(cache_->Stats().pinned_bytes, 2 * kPageBytes);
}

TEST_F(DevicesTest, APolicyIsForAllCopies) {
  PutFree(a_, 1);
  PutFree(b_, 1);
  const PolicyChange change{.key = KeyOf(1),
                            .policy = {.ttl = absl::Seconds(5)}};
  EXPECT_EQ(cache_->SetPolicy({&change, 1}).num_changed, 1u);
  clock_.Advance(absl::Seconds(6));
  cache_->ExpireDue();
  EXPECT_THAT(PlacesOf(1), IsEmpty());
  EXPECT_EQ(WhyMissing(b_, 1), MissReason::kExpired);
}

TEST_F(DevicesTest, ADeviceThatIsNotThereHasNoSessions) {
  EXPECT_THAT(
      cache_->OpenSession({.shape = kShape, .device = 2}).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("device 2 of 2")));
}

TEST_F(DevicesTest, AFullDeviceLeavesTheOtherAlone) {
  MakeDevices(/*host_pages=*/0);
  PutMany(b_, 1, 8);
  PutMany(a_, 11, 30);
  EXPECT_EQ(UsedPages(Tier::kDevice, 1), 8u);
  for (int m = 1; m <= 8; ++m) EXPECT_TRUE(Touch(b_, m));
}

TEST_F(DevicesTest, AWorkersEndReachesItsOwnDeviceAlone) {
  const SessionId dying = Open(ProcessId{1}, "v", kShape, 1);
  AskOne(dying, 1);
  Put(b_, 2);
  Put(a_, 2);
  const TierStats before = StatsOf(Tier::kDevice, 0);
  cache_->CloseSession(dying, "killed");
  EXPECT_EQ(StatsOf(Tier::kDevice, 1).quarantined_bytes, kPageBytes);
  cache_->OnProcessDeath(ProcessId{1});
  EXPECT_EQ(StatsOf(Tier::kDevice, 1).quarantined_bytes, 0u);
  EXPECT_EQ(StatsOf(Tier::kDevice, 0).used_bytes, before.used_bytes);
  EXPECT_EQ(StatsOf(Tier::kDevice, 0).leased_bytes, before.leased_bytes);
}

}  // namespace
}  // namespace promptcache::daemon
