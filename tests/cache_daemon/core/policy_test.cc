// Policies set on modules that are there already.
#include <iterator>
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class PolicyTest : public CacheFixture {
 protected:
  PolicyResult SetOne(int module, const CachePolicy& policy) {
    const PolicyChange change{.key = KeyOf(module), .policy = policy};
    return cache_->SetPolicy({&change, 1});
  }
  PolicyResult Prolong(int module, const CachePolicy& policy) {
    const PolicyChange change{
        .key = KeyOf(module), .policy = policy, .only_longer = true};
    return cache_->SetPolicy({&change, 1});
  }
  PolicyResult SetAll(const SchemaPolicies& policies) {
    absl::StatusOr<PolicyResult> result = cache_->SetPolicy("s", policies);
    EXPECT_THAT(result, IsOk());
    return result.ok() ? *result : PolicyResult{};
  }
};

TEST_F(PolicyTest, ASlidingTimeRunsFromTheChange) {
  const SessionId a = Open();
  PutFree(a, 1);
  clock_.Advance(absl::Seconds(50));
  EXPECT_EQ(SetOne(1, {.ttl = absl::Seconds(10)}).num_changed, 1u);
  EXPECT_EQ(Info(1).expire_time, clock_.Now() + absl::Seconds(10));
  clock_.Advance(absl::Seconds(9));
  EXPECT_TRUE(Touch(a, 1));  // and slides
  clock_.Advance(absl::Seconds(9));
  EXPECT_TRUE(Touch(a, 1));
  clock_.Advance(absl::Seconds(11));
  cache_->ExpireDue();
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(PolicyTest, AnAbsoluteTimeRunsFromTheCommit) {
  const SessionId a = Open();
  PutFree(a, 1);
  PutFree(a, 2);
  clock_.Advance(absl::Seconds(50));
  SetOne(1, {.ttl = absl::Seconds(60), .absolute_ttl = true});
  SetOne(2, {.ttl = absl::Seconds(40), .absolute_ttl = true});
  cache_->ExpireDue();
  EXPECT_EQ(WhyMissing(a, 2), MissReason::kExpired);
  EXPECT_TRUE(Touch(a, 1));
  clock_.Advance(absl::Seconds(11));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
}

TEST_F(PolicyTest, ALongerTimeSaves) {
  const SessionId a = Open();
  PutFree(a, 1, 1, {.ttl = absl::Seconds(10)});
  SetOne(1, {.ttl = absl::Seconds(1000)});
  clock_.Advance(absl::Seconds(900));
  cache_->ExpireDue();
  EXPECT_TRUE(Touch(a, 1));
}

TEST_F(PolicyTest, TheSamePolicyAgainChangesNothing) {
  const SessionId a = Open();
  const CachePolicy policy{.ttl = absl::Seconds(10)};
  PutFree(a, 1, 1, policy);
  clock_.Advance(absl::Seconds(9));
  EXPECT_EQ(SetOne(1, policy).num_changed, 0u);
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(WhyMissing(a, 1), MissReason::kExpired);
}

TEST_F(PolicyTest, TheLastOfManyChangesCounts) {
  const SessionId a = Open();
  PutFree(a, 1);
  for (int i = 0; i < 5000; ++i) {
    SetOne(1, {.ttl = absl::Seconds(100 + i % 2)});
  }
  clock_.Advance(absl::Seconds(102));
  cache_->ExpireDue();
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(PolicyTest, APinComesAndGoesWithItsPolicy) {
  const SessionId a = Open();
  PutFree(a, 1);
  EXPECT_THAT(SetOne(1, {.pin = true}).pinned, ElementsAre(KeyOf(1)));
  EXPECT_EQ(cache_->Stats().pinned_bytes, kPageBytes);
  for (int m = 2; m <= 20; ++m) PutFree(a, m);
  EXPECT_TRUE(Touch(a, 1));
  EXPECT_THAT(SetOne(1, {}).unpinned, ElementsAre(KeyOf(1)));
  EXPECT_EQ(cache_->Stats().pinned_bytes, 0u);
}

TEST_F(PolicyTest, WhatOnlyProlongsNeverShortens) {
  const SessionId a = Open();
  const auto seconds = [](int s) { return absl::Seconds(s); };
  struct Case {
    CachePolicy has, asks;
    absl::Duration left;  // after the change, 50 s after the commit
  };
  // Sliding ones run from the change, absolute ones from the commit.
  const Case cases[] = {
      {{.ttl = seconds(60)}, {.ttl = seconds(600)}, seconds(600)},
      {{.ttl = seconds(600)}, {.ttl = seconds(60)}, seconds(550)},
      {{.ttl = seconds(60)}, {}, absl::Hours(24)},
      {{}, {.ttl = seconds(60)}, absl::Hours(24) - seconds(50)},
      {{.ttl = seconds(60)},
       {.ttl = seconds(600), .absolute_ttl = true},
       seconds(600)},
      {{.ttl = seconds(600), .absolute_ttl = true},
       {.ttl = seconds(60)},
       seconds(600)},
      {{.ttl = seconds(60), .absolute_ttl = true},
       {.ttl = seconds(600), .absolute_ttl = true},
       seconds(550)}};
  for (int i = 0; i < static_cast<int>(std::size(cases)); ++i) {
    PutFree(a, i, 1, cases[i].has);
    clock_.Advance(seconds(50));
    Prolong(i, cases[i].asks);
    EXPECT_EQ(Info(i).expire_time - clock_.Now(), cases[i].left) << i;
  }
}

TEST_F(PolicyTest, WhatOnlyProlongsPinsAndNeverUnpins) {
  const SessionId a = Open();
  PutFree(a, 1);
  EXPECT_THAT(Prolong(1, {.pin = true}).pinned, ElementsAre(KeyOf(1)));
  EXPECT_THAT(Prolong(1, {.ttl = absl::Hours(99)}).unpinned, IsEmpty());
  EXPECT_TRUE(Info(1).pinned);
  // An operator's word holds until somebody asks for a pin again.
  PC_EXPECT_OK(cache_->Pin({.all = true}, /*pin=*/false));
  Prolong(1, {.ttl = absl::Hours(100)});
  EXPECT_FALSE(Info(1).pinned);
  EXPECT_EQ(Prolong(2, {.pin = true}).num_changed, 0u);  // is not there
}

TEST_F(PolicyTest, AnOperatorsPinStays) {
  const SessionId a = Open();
  PutFree(a, 1);
  PC_EXPECT_OK(cache_->Pin({.all = true}, /*pin=*/true));
  EXPECT_THAT(SetOne(1, {.ttl = absl::Seconds(10)}).unpinned, IsEmpty());
  EXPECT_TRUE(Info(1).pinned);
}

TEST_F(PolicyTest, APinOverTheBudgetIsRefusedAndToldAndTriedAgain) {
  Config config;
  config.options.pin_budget_bytes = kPageBytes;
  Make(config);
  const SessionId a = Open();
  PutFree(a, 1, 1, {.pin = true});
  PutFree(a, 2);
  PolicyResult result = SetOne(2, {.ttl = absl::Seconds(5), .pin = true});
  EXPECT_EQ(result.pins_refused.size(), 1u);
  EXPECT_THAT(result.pinned, IsEmpty());
  EXPECT_FALSE(Info(2).pinned);
  EXPECT_EQ(Info(2).expire_time, clock_.Now() + absl::Seconds(5));
  EXPECT_EQ(cache_->Stats().pins_refused, 1u);
  SetOne(1, {});
  result = SetOne(2, {.ttl = absl::Seconds(5), .pin = true});
  EXPECT_THAT(result.pinned, ElementsAre(KeyOf(2)));

  PutFree(a, 3, 1, {.pin = true});
  EXPECT_FALSE(Info(3).pinned);
  EXPECT_EQ(cache_->Stats().pins_refused, 2u);
}

TEST_F(PolicyTest, ASchemasPoliciesReachResidentAndKnownModules) {
  const SessionId a = Open();
  for (int m = 1; m <= 4; ++m) PutFree(a, m);
  PC_EXPECT_OK(cache_->Evict({.schema = "s", .path = "m3"}));
  PC_EXPECT_OK(cache_->Evict({.schema = "s", .path = "m4"}));
  AskOne(a, 4);  // a reservation: known from its earlier life
  SchemaPolicies policies;
  policies.policy.pin = true;
  policies.by_path.emplace("m2", CachePolicy{.ttl = absl::Seconds(7)});
  const PolicyResult result = SetAll(policies);
  EXPECT_THAT(result.pinned,
              UnorderedElementsAre(KeyOf(1), KeyOf(3), KeyOf(4)));
  EXPECT_EQ(result.num_changed, 4u);
  EXPECT_EQ(Info(2).expire_time, clock_.Now() + absl::Seconds(7));
  PutFree(a, 3);
  EXPECT_TRUE(Info(3).pinned);
  EXPECT_EQ(cache_->SetPolicy("t", {})->num_changed, 0u);
  EXPECT_EQ(SetOne(99, {.pin = true}).num_changed, 0u);
}

TEST_F(PolicyTest, UnpinReachesWhatIsNotResident) {
  const SessionId a = Open();
  PutFree(a, 1, 1,
          {.ttl = absl::Seconds(5), .absolute_ttl = true, .pin = true});
  clock_.Advance(absl::Seconds(6));
  cache_->ExpireDue();
  ASSERT_TRUE(Info(1).pinned);  // would come back pinned
  absl::StatusOr<PinResult> result =
      cache_->Pin({.schema = "s"}, /*pin=*/false);
  PC_ASSERT_OK(result);
  EXPECT_THAT(result->keys, ElementsAre(KeyOf(1)));
  PutFree(a, 1);
  EXPECT_FALSE(Info(1).pinned);
  // A pin does not reach it.
  PC_EXPECT_OK(cache_->Evict({.all = true}));
  EXPECT_EQ(cache_->Pin({.schema = "s"}, /*pin=*/true)->num_changed, 0u);
}

}  // namespace
}  // namespace promptcache::daemon
