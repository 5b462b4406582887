// Lists, filters, statistics, events.
#include <algorithm>
#include <vector>

#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using ListTest = CacheFixture;
using StatsTest = CacheFixture;
using EventsTest = CacheFixture;

std::vector<ModuleKey> SortedKeys(int n) {
  std::vector<ModuleKey> keys;
  for (int m = 1; m <= n; ++m) keys.push_back(KeyOf(m));
  std::sort(keys.begin(), keys.end());
  return keys;
}

TEST_F(ListTest, PagesComeInTheOrderOfKeysWithoutGapsOrRepeats) {
  const SessionId a = Open();
  for (int m = 1; m <= 7; ++m) PutFree(a, m);
  std::vector<ModuleKey> seen;
  ListArgs args{.page_size = 3};
  std::vector<size_t> sizes;
  while (true) {
    absl::StatusOr<ListResult> result = cache_->List(args);
    PC_ASSERT_OK(result);
    sizes.push_back(result->modules.size());
    for (const ModuleInfo& info : result->modules) seen.push_back(info.key);
    if (!result->more) break;
    args.after = seen.back();
  }
  EXPECT_EQ(seen, SortedKeys(7));
  EXPECT_THAT(sizes, ElementsAre(3, 3, 1));
}

TEST_F(ListTest, AFullLastPageHasNoMore) {
  const SessionId a = Open();
  for (int m = 1; m <= 4; ++m) PutFree(a, m);
  absl::StatusOr<ListResult> result = cache_->List({.page_size = 4});
  PC_ASSERT_OK(result);
  EXPECT_THAT(result->modules, SizeIs(4));
  EXPECT_FALSE(result->more);
}

TEST_F(ListTest, AbsentModulesAreMergedInWhenAskedFor) {
  const SessionId a = Open();
  for (int m = 1; m <= 6; ++m) PutFree(a, m);
  PC_EXPECT_OK(cache_->Evict({.schema = "s", .path = "m2"}));
  PC_EXPECT_OK(cache_->Evict({.schema = "s", .path = "m5"}));
  AskOne(a, 5);  // reserved again: listed once
  EXPECT_THAT(cache_->List({})->modules, SizeIs(5));
  absl::StatusOr<ListResult> all = cache_->List({.include_absent = true});
  PC_ASSERT_OK(all);
  std::vector<ModuleKey> keys;
  for (const ModuleInfo& info : all->modules) keys.push_back(info.key);
  EXPECT_EQ(keys, SortedKeys(6));
  EXPECT_EQ(Info(2).absence, MissReason::kEvicted);
  EXPECT_EQ(Info(2).state, ModuleState::kNone);
  EXPECT_EQ(Info(5).state, ModuleState::kReserved);
}

TEST_F(ListTest, MoreModulesThanOneHoldOfTheLockLooksAt) {
  Make({.device_pages = 3000, .segment_pages = 3000});
  const SessionId a = Open();
  for (int m = 1; m <= 2500; ++m) PutFree(a, m);
  absl::StatusOr<ListResult> result =
      cache_->List({.filter = ModuleFilter{.schema = "s", .path = "m2400"}});
  PC_ASSERT_OK(result);
  EXPECT_THAT(result->modules, SizeIs(1));
  EXPECT_THAT(cache_->List({.page_size = 3000})->modules, SizeIs(2500));
  EXPECT_EQ(cache_->Evict({.all = true})->num_evicted, 2500u);
}

TEST_F(ListTest, FiltersMatchEverythingThatIsSet) {
  const SessionId a = Open();
  for (int m = 1; m <= 3; ++m) PutFree(a, m);
  const auto count = [&](const ModuleFilter& filter) {
    return cache_->List({.filter = filter})->modules.size();
  };
  EXPECT_EQ(count({}), 0u);
  EXPECT_EQ(count({.all = true}), 3u);
  EXPECT_EQ(count({.schema = "s"}), 3u);
  EXPECT_EQ(count({.schema = "t"}), 0u);
  EXPECT_EQ(count({.schema = "s", .path = "m2"}), 1u);
  EXPECT_EQ(count({.keys = {KeyOf(1).ToHex(), KeyOf(3).ToHex()}}), 2u);
  EXPECT_EQ(count({.keys = {KeyOf(1).ToHex()}, .schema = "t"}), 0u);
  EXPECT_EQ(count({.keys = {KeyOf(1).ToHex().substr(0, 8)}}), 1u);
  EXPECT_EQ(count({.keys = {"0123456789"}}), 0u);
}

TEST_F(ListTest, BadFiltersAreRefused) {
  const auto refused = [&](const ModuleFilter& filter, const char* why) {
    EXPECT_THAT(cache_->List({.filter = filter}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
    EXPECT_THAT(cache_->Evict(filter),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refused({.path = "m1"}, "without a schema");
  refused({.keys = {"abc"}}, "fewer than 8");
  refused({.keys = {"0123456z"}}, "hexadecimal");
  refused({.keys = {std::string(65, 'a')}}, "more than 64");
}

TEST_F(ListTest, APrefixOfTwoModulesIsAmbiguous) {
  const auto key_with = [](uint8_t last) {
    Digest digest;
    digest.bytes[0] = 0xab;
    digest.bytes[31] = last;
    return digest;
  };
  for (uint8_t i : {uint8_t{1}, uint8_t{2}}) {
    ModuleInfo info;
    info.key = key_with(i);
    cache_->AddKnown(info, {});
  }
  EXPECT_THAT(
      cache_->Get("ab000000"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ambiguous")));
  EXPECT_THAT(cache_->Get(key_with(2).ToHex()), IsOk());
  EXPECT_THAT(cache_->Get("AB" + std::string(61, '0') + "1"), IsOk());
}

TEST_F(ListTest, GetTellsUnknownFromAbsent) {
  EXPECT_THAT(cache_->Get(KeyOf(1).ToHex()),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("not known")));
  EXPECT_THAT(cache_->Get(KeyOf(1).ToHex().substr(0, 10)),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("begins")));
}

TEST_F(ListTest, AModuleTellsAllThatIsKnownOfIt) {
  const SessionId a = Open();
  const AcquireResult result = Ask(a, 1, 2);
  CommitModule commit = Sealed(result.modules[0], 1, {}, 555);
  commit.metadata.text_sha256 = KeyOf(100);
  commit.metadata.context_key = KeyOf(101);
  PC_ASSERT_OK(cache_->Commit(a, {&commit, 1}));
  const absl::Time committed = clock_.Now();
  clock_.Advance(absl::Seconds(5));
  Ask(a, 1, 2);
  const ModuleInfo info = Info(1);
  EXPECT_EQ(info.metadata.schema, "s");
  EXPECT_EQ(info.metadata.path, "m1");
  EXPECT_EQ(info.metadata.text_sha256, KeyOf(100));
  EXPECT_EQ(info.metadata.context_key, KeyOf(101));
  EXPECT_EQ(info.metadata.compute_us, 555u);
  EXPECT_EQ(info.metadata.num_tokens, 32u);
  EXPECT_EQ(info.isolation_domain, "default");
  EXPECT_EQ(info.bytes, 2 * kPageBytes);
  EXPECT_EQ(info.state, ModuleState::kCommitted);
  EXPECT_EQ(info.tier, Tier::kDevice);
  EXPECT_EQ(info.num_leases, 2u);
  EXPECT_EQ(info.hits, 1u);
  EXPECT_EQ(info.commit_time, committed);
  EXPECT_EQ(info.last_use_time, clock_.Now());
  EXPECT_EQ(info.expire_time, clock_.Now() + absl::Hours(24));
}

TEST_F(StatsTest, ATierAddsUp) {
  const SessionId a = Open(ProcessId{1});
  const SessionId b = Open();
  PutFree(b, 1, 2);
  Put(b, 2, 3);
  PutFree(b, 3, 1, {.pin = true});
  AskOne(b, 4, 2);
  AskOne(a, 5, 4);
  cache_->CloseSession(a, "lost");
  const TierStats stats = StatsOf(Tier::kDevice);
  EXPECT_EQ(stats.kind.substr(0, 9), "cpu memfd");
  EXPECT_EQ(stats.capacity_bytes, 16 * kPageBytes);
  EXPECT_EQ(stats.used_bytes, 12 * kPageBytes);
  EXPECT_EQ(stats.leased_bytes, 3 * kPageBytes);
  EXPECT_EQ(stats.pinned_bytes, kPageBytes);
  EXPECT_EQ(stats.reserved_bytes, 2 * kPageBytes);
  EXPECT_EQ(stats.quarantined_bytes, 4 * kPageBytes);
  EXPECT_EQ(stats.largest_free_run_bytes, 4 * kPageBytes);
  EXPECT_EQ(stats.num_modules, 3u);
  EXPECT_EQ(stats.num_segments, 2u);
  EXPECT_EQ(CountIn(ModuleState::kReserved), 1u);
  EXPECT_EQ(CountIn(ModuleState::kCommitted), 3u);
  EXPECT_EQ(CountIn(ModuleState::kQuarantined), 1u);
  EXPECT_EQ(cache_->Stats().num_reservations, 1u);
}

TEST_F(StatsTest, HitsAndEvictionsAreCountedByTier) {
  Make({.device_pages = 8, .host_pages = 8});
  const SessionId a = Open();
  PutFree(a, 1, 2);
  EXPECT_TRUE(Touch(a, 1, 2));
  for (int m = 2; m <= 8; ++m) {
    clock_.Advance(absl::Seconds(2));
    PutFree(a, m);
    RunMover();  // demotes the oldest
  }
  ASSERT_EQ(Info(1).tier, Tier::kHost);
  EXPECT_TRUE(Touch(a, 1, 2));
  EXPECT_TRUE(Touch(a, 8));
  EXPECT_EQ(StatsOf(Tier::kHost).hits.count, 1u);
  EXPECT_EQ(StatsOf(Tier::kHost).hits.volume, 32u);
  EXPECT_EQ(StatsOf(Tier::kDevice).hits.count, 2u);
  EXPECT_EQ(StatsOf(Tier::kDevice).hits.volume, 48u);
  const auto committed = [&](Tier tier) {
    return StatsOf(tier).modules[static_cast<size_t>(ModuleState::kCommitted)];
  };
  EXPECT_EQ(committed(Tier::kHost), StatsOf(Tier::kHost).num_modules);
  EXPECT_EQ(committed(Tier::kHost) + committed(Tier::kDevice), 8u);
  PC_EXPECT_OK(cache_->Evict({.schema = "s", .path = "m1"}));
  const auto requested = [&](Tier tier) {
    return StatsOf(tier)
        .evictions[static_cast<size_t>(EvictReason::kRequested)];
  };
  EXPECT_EQ(requested(Tier::kHost).count, 1u);
  EXPECT_EQ(requested(Tier::kHost).volume, 2 * kPageBytes);
  EXPECT_EQ(requested(Tier::kDevice).count, 0u);
}

TEST_F(StatsTest, UseIsSummedAsReported) {
  cache_->ReportUse(
      {.cached_tokens = 100, .created_tokens = 20, .fresh_tokens = 3});
  cache_->ReportUse({.cached_tokens = 1,
                     .created_tokens = 1,
                     .fresh_tokens = 1,
                     .preemptions = 2,
                     .recomputed_tokens = 70,
                     .attention_needed_tokens = 900,
                     .attention_read_tokens = 300});
  const CacheStats stats = cache_->Stats();
  EXPECT_EQ(stats.request_cached_tokens, 101u);
  EXPECT_EQ(stats.request_created_tokens, 21u);
  EXPECT_EQ(stats.request_fresh_tokens, 4u);
  EXPECT_EQ(stats.request_preemptions, 2u);
  EXPECT_EQ(stats.request_recomputed_tokens, 70u);
  EXPECT_EQ(stats.attention_needed_tokens, 900u);
  EXPECT_EQ(stats.attention_read_tokens, 300u);
}

TEST_F(EventsTest, EverythingThatHappensIsTold) {
  const std::shared_ptr<EventWatcher> watcher =
      events_.Watch(/*capacity=*/100, nullptr);
  const SessionId a = Open();
  Put(a, 1);
  const AcquiredModule reserved = AskOne(a, 2);
  PC_EXPECT_OK(cache_->Abort(a, {&reserved.reservation, 1}));
  PC_EXPECT_OK(cache_->Evict({.all = true}));
  cache_->CloseSession(a, "done");
  std::vector<CacheEvent::Kind> kinds;
  while (std::optional<CacheEvent> event = watcher->Next()) {
    kinds.push_back(event->kind);
    EXPECT_EQ(event->time, clock_.Now());
    if (event->kind == CacheEvent::Kind::kEvicted) {
      EXPECT_EQ(event->key, KeyOf(1));
      EXPECT_EQ(event->path, "m1");
      EXPECT_EQ(event->bytes, kPageBytes);
      EXPECT_EQ(event->evict_reason, EvictReason::kRequested);
    }
  }
  EXPECT_THAT(kinds, ElementsAre(CacheEvent::Kind::kSessionOpened,
                                 CacheEvent::Kind::kCommitted,
                                 CacheEvent::Kind::kReservationAborted,
                                 CacheEvent::Kind::kEvicted,
                                 CacheEvent::Kind::kSessionClosed));
}

TEST(EventHubTest, ASlowReaderIsToldHowManyItMissed) {
  EventHub hub;
  int ready = 0;
  const auto watcher = hub.Watch(/*capacity=*/2, [&] { ++ready; });
  for (int i = 0; i < 5; ++i) {
    CacheEvent event;
    event.bytes = static_cast<uint64_t>(i);
    hub.Emit(event);
  }
  EXPECT_EQ(ready, 1);
  std::optional<CacheEvent> event = watcher->Next();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->kind, CacheEvent::Kind::kMissed);
  EXPECT_EQ(event->missed_events, 3u);
  EXPECT_EQ(watcher->Next()->bytes, 3u);
  EXPECT_EQ(watcher->Next()->bytes, 4u);
  EXPECT_FALSE(watcher->Next().has_value());
  hub.Emit({});
  EXPECT_EQ(ready, 2);
}

TEST(EventHubTest, AReaderThatIsGoneCostsNothing) {
  EventHub hub;
  EXPECT_FALSE(hub.has_watchers());
  auto watcher = hub.Watch(2, nullptr);
  EXPECT_TRUE(hub.has_watchers());
  watcher.reset();
  hub.Emit({});
  EXPECT_FALSE(hub.has_watchers());
}

}  // namespace
}  // namespace promptcache::daemon
