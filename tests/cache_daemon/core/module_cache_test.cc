#include "cache_daemon/core/module_cache.h"

#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

using ModuleCacheTest = CacheFixture;

TEST_F(ModuleCacheTest, FirstAskerReservesThenEverybodyHits) {
  const SessionId a = Open();
  const AcquireResult first = Ask(a, 1, 2);
  EXPECT_EQ(first.modules[0].outcome, Outcome::kReserved);
  EXPECT_EQ(first.modules[0].miss_reason, MissReason::kNeverSeen);
  EXPECT_NE(first.lease, LeaseId{});
  Fill(first.modules[0].runs, 1);
  EXPECT_TRUE(CommitOne(a, first.modules[0], 1));

  const AcquireResult second = Ask(Open(), 1, 2);
  EXPECT_EQ(second.modules[0].outcome, Outcome::kHit);
  EXPECT_EQ(second.modules[0].runs, first.modules[0].runs);
  EXPECT_EQ(second.modules[0].generation, first.modules[0].generation);
  EXPECT_EQ(second.modules[0].reservation, ReservationId{});
  EXPECT_TRUE(Holds(second.modules[0].runs, 1));
  EXPECT_EQ(UsedPages(), 2u);
}

TEST_F(ModuleCacheTest, CommitKeepsTheLeaseOfItsAcquire) {
  const SessionId a = Open();
  const LeaseId lease = Put(a, 1);
  EXPECT_EQ(Info(1).num_leases, 1u);
  Release(a, lease);
  EXPECT_EQ(Info(1).num_leases, 0u);
  EXPECT_EQ(cache_->Stats().num_leases, 0u);
}

TEST_F(ModuleCacheTest, CommitAfterReleaseIsNotLeased) {
  const SessionId a = Open();
  const AcquireResult result = Ask(a, 1);
  Release(a, result.lease);
  EXPECT_TRUE(CommitOne(a, result.modules[0], 1));
  EXPECT_EQ(Info(1).num_leases, 0u);
}

TEST_F(ModuleCacheTest, PageSumsComeWithAHitWhenAskedFor) {
  const SessionId a = Open();
  Put(a, 1, 3);
  const AcquireKey key{.key = KeyOf(1), .num_tokens = 48};
  absl::StatusOr<AcquireResult> result =
      cache_->Acquire(a, {.keys = {&key, 1}, .want_page_sums = true});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].page_sums,
            *pool_->Sums(result->modules[0].runs, kPageBytes));
  EXPECT_THAT(AskOne(a, 1, 3).page_sums, SizeIs(0));
}

TEST_F(ModuleCacheTest, OneAcquireAnswersEveryKey) {
  const SessionId a = Open();
  Put(a, 1);
  Ask(a, 2);  // reserved
  const std::vector<AcquireKey> keys = {{.key = KeyOf(1), .num_tokens = 16},
                                        {.key = KeyOf(2), .num_tokens = 16},
                                        {.key = KeyOf(3), .num_tokens = 16},
                                        {.key = KeyOf(4), .num_tokens = 999}};
  absl::StatusOr<AcquireResult> result =
      cache_->Acquire(a, {.keys = keys, .reserve_missing = true});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].outcome, Outcome::kHit);
  EXPECT_EQ(result->modules[1].outcome, Outcome::kPending);
  EXPECT_EQ(result->modules[1].miss_reason, MissReason::kNotYetCommitted);
  EXPECT_EQ(result->modules[2].outcome, Outcome::kReserved);
  EXPECT_EQ(result->modules[3].outcome, Outcome::kMiss);
  EXPECT_EQ(result->modules[3].miss_reason, MissReason::kNoMemory);
}

TEST_F(ModuleCacheTest, AKeyNamedTwiceIsReservedOnceAndPendingOnce) {
  const SessionId a = Open();
  const std::vector<AcquireKey> keys(2, {.key = KeyOf(1), .num_tokens = 16});
  absl::StatusOr<AcquireResult> result = cache_->Acquire(
      a, {.request_id = 5, .keys = keys, .reserve_missing = true});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].outcome, Outcome::kReserved);
  EXPECT_EQ(result->modules[1].outcome, Outcome::kPending);
  CommitOne(a, result->modules[0], 1);
  ASSERT_THAT(resolved_, SizeIs(1));
  EXPECT_EQ(resolved_[0].request_id, 5u);
  EXPECT_EQ(resolved_[0].index, 1u);
}

TEST_F(ModuleCacheTest, ReadOnlyAskersReserveNothing) {
  const SessionId a = Open();
  const AcquireResult result = Ask(a, 1, 1, /*reserve=*/false);
  EXPECT_EQ(result.modules[0].outcome, Outcome::kMiss);
  EXPECT_EQ(result.lease, LeaseId{});
  EXPECT_EQ(UsedPages(), 0u);
}

TEST_F(ModuleCacheTest, WrongNumbersAreRefusedAndChangeNothing) {
  const SessionId a = Open();
  PutFree(a, 1, 2);
  const std::vector<AcquireKey> keys = {{.key = KeyOf(2), .num_tokens = 16},
                                        {.key = KeyOf(1), .num_tokens = 16}};
  EXPECT_THAT(
      cache_->Acquire(a, {.keys = keys, .reserve_missing = true}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("32 tokens")));
  const AcquireKey none{.key = KeyOf(3)};
  EXPECT_THAT(
      cache_->Acquire(a, {.keys = {&none, 1}}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no tokens")));
  EXPECT_EQ(UsedPages(), 2u);
  EXPECT_EQ(cache_->Stats().num_leases, 0u);
  EXPECT_EQ(cache_->Stats().miss_lookups, 1u);
}

TEST_F(ModuleCacheTest, CommitWithWrongSumsIsRefusedAndMayBeRepeated) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 2);
  CommitModule commit = Sealed(reserved, 1);
  commit.page_sums.pop_back();
  EXPECT_THAT(
      cache_->Commit(a, {&commit, 1}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("1 page sums")));
  commit = Sealed(reserved, 1);
  commit.metadata.num_tokens = 16;
  EXPECT_THAT(
      cache_->Commit(a, {&commit, 1}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("16 tokens")));
  EXPECT_TRUE(CommitOne(a, reserved, 1));
}

TEST_F(ModuleCacheTest, AnothersOrAnOldReservationIsNotCommitted) {
  const SessionId a = Open();
  const SessionId b = Open();
  const AcquiredModule reserved = AskOne(a, 1);
  EXPECT_FALSE(CommitOne(b, reserved, 1));
  EXPECT_TRUE(CommitOne(a, reserved, 1));
  EXPECT_FALSE(CommitOne(a, reserved, 1));
  EXPECT_EQ(cache_->Stats().commits, 1u);
}

TEST_F(ModuleCacheTest, UnknownIdsAreNotFound) {
  const SessionId a = Open();
  const ReservationId reservation{12345};
  EXPECT_THAT(cache_->Release(a, LeaseId{99}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("lease 99")));
  EXPECT_THAT(cache_->Abort(a, {&reservation, 1}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("12345")));
  EXPECT_THAT(cache_->Acquire(SessionId{99}, {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("session 99")));
  EXPECT_THAT(cache_->Commit(SessionId{99}, {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("session 99")));
  cache_->CloseSession(SessionId{99}, "none");
}

TEST_F(ModuleCacheTest, OneSessionCannotReleaseAnothersLease) {
  const SessionId a = Open();
  const LeaseId lease = Put(a, 1);
  EXPECT_THAT(cache_->Release(Open(), lease),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("")));
  EXPECT_EQ(Info(1).num_leases, 1u);
}

TEST_F(ModuleCacheTest, AForgedKeyOfAnotherDomainLearnsNothing) {
  const SessionId a = Open();
  Put(a, 1);
  const AcquireResult result = Ask(a, 1, 1, /*reserve=*/true, "tenant-2");
  EXPECT_EQ(result.modules[0].outcome, Outcome::kMiss);
  EXPECT_EQ(result.modules[0].miss_reason, MissReason::kNeverSeen);
  EXPECT_THAT(result.modules[0].runs, SizeIs(0));
}

TEST_F(ModuleCacheTest, AnotherPageSizeOfTheSameKeyIsALayoutMiss) {
  Put(Open(), 1, 2);
  const SessionId b =
      Open(ProcessId{}, "w", {.page_bytes = 8192, .page_tokens = 32});
  const AcquireKey key{.key = KeyOf(1), .num_tokens = 32};
  absl::StatusOr<AcquireResult> result =
      cache_->Acquire(b, {.keys = {&key, 1}, .reserve_missing = true});
  PC_ASSERT_OK(result);
  EXPECT_EQ(result->modules[0].outcome, Outcome::kMiss);
  EXPECT_EQ(result->modules[0].miss_reason, MissReason::kIdentityDiffers);
  EXPECT_EQ(result->modules[0].differing_field, IdentityField::kLayout);
}

TEST_F(ModuleCacheTest, AnImpossibleShapeOpensNoSession) {
  for (const PageShape& shape :
       {PageShape{}, PageShape{.page_bytes = 4097, .page_tokens = 16},
        PageShape{.page_bytes = 4096, .page_tokens = 0},
        PageShape{.page_bytes = 1 << 20, .page_tokens = 16}}) {
    EXPECT_THAT(
        cache_->OpenSession({.shape = shape}),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("a page of")));
  }
}

TEST_F(ModuleCacheTest, AbortGivesThePagesBack) {
  const SessionId a = Open();
  const AcquiredModule reserved = AskOne(a, 1, 4);
  EXPECT_EQ(StatsOf(Tier::kDevice).reserved_bytes, 4 * kPageBytes);
  PC_EXPECT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  EXPECT_EQ(UsedPages(), 0u);
  EXPECT_EQ(cache_->Stats().aborted_reservations, 1u);
  EXPECT_FALSE(CommitOne(a, reserved, 1));
  // Nothing was committed: it is as new as before.
  EXPECT_EQ(AskOne(a, 1).miss_reason, MissReason::kNeverSeen);
}

}  // namespace
}  // namespace promptcache::daemon
