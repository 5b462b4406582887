// The worker's client against a real daemon in this process.

#include "inference_worker/cache/cache_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <span>
#include <thread>

#include "absl/strings/match.h"
#include "common/page_sum.h"
#include "inference_worker/cache/registry_client.h"
#include "tests/cache_daemon/service/daemon_fixture.h"

namespace promptcache::worker {
namespace {

using ::promptcache::daemon::kPatience;
using ::promptcache::daemon::TestLayout;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

absl::Time Later() { return absl::Now() + kPatience; }

class CacheClientTest : public daemon::DaemonFixture {
 protected:
  std::unique_ptr<CacheClient> NewClient(const std::string& worker_id) {
    return NewClient({.socket_path = options_.socket_path,
                      .worker_id = worker_id,
                      .model = "test",
                      .layout = TestLayout(),
                      .acquire_timeout = kPatience});
  }
  std::unique_ptr<CacheClient> NewClient(const CacheClient::Options& options) {
    auto client = CacheClient::Create(options);
    PC_EXPECT_OK(client);
    return *std::move(client);
  }
  std::unique_ptr<CacheClient> AttachedClient(const std::string& worker_id) {
    auto client = NewClient(worker_id);
    PC_EXPECT_OK(client->WaitAttached(Later()));
    return client;
  }
  static CacheClient::AcquireArgs Args(const std::vector<std::string>& names,
                                       uint32_t num_tokens = 20) {
    CacheClient::AcquireArgs args{.schema = "schema"};
    for (const std::string& name : names) {
      args.keys.push_back(
          {.key = Sha256Of(name), .num_tokens = num_tokens, .path = name});
    }
    return args;
  }
  static std::unique_ptr<CacheLease> Acquire(
      CacheClient& client, const CacheClient::AcquireArgs& args) {
    auto lease = client.Acquire(args);
    PC_EXPECT_OK(lease);
    return lease.ok() ? *std::move(lease) : nullptr;
  }
  // Fills the reserved pages of module `index` with `value`, and commits it.
  static bool FillAndCommit(CacheLease* lease, size_t index, int value,
                            bool pin = false) {
    const AcquiredModule& module = lease->modules()[index];
    CommitModule commit{.reservation_id = module.reservation_id,
                        .schema = "schema",
                        .path = absl::StrCat(index),
                        .num_tokens = 20,
                        .compute_us = 1000,
                        .pin = pin};
    for (std::byte* page : module.write_pages) {
      std::memset(page, value, TestLayout().page_bytes());
      commit.page_sums.push_back(PageSum({page, TestLayout().page_bytes()}));
    }
    const auto committed = lease->Commit({commit}, Later());
    PC_EXPECT_OK(committed);
    return committed.ok() && committed->at(0);
  }
  static int ByteOf(const CacheLease& lease, size_t index) {
    const auto* page = lease.modules()[index].read_pages.back();
    return static_cast<int>(page[TestLayout().page_bytes() - 1]);
  }
};

TEST_F(CacheClientTest, TwoWorkersShareOneModulesMemory) {
  StartDaemon();
  auto a = AttachedClient("a");
  auto b = AttachedClient("b");
  auto written = Acquire(*a, Args({"m"}));
  ASSERT_EQ(written->modules()[0].outcome, AcquireOutcome::kReserved);
  EXPECT_EQ(written->modules()[0].miss_reason, CacheMissReason::kNeverSeen);
  EXPECT_THAT(written->modules()[0].write_pages, SizeIs(2));
  std::byte* page = written->modules()[0].write_pages[0];
  EXPECT_TRUE(written->Valid(0));
  ASSERT_TRUE(FillAndCommit(written.get(), 0, 0x5a));
  EXPECT_THAT(written->modules()[0].write_pages, IsEmpty());
  EXPECT_TRUE(written->Valid(0));
  const uint64_t used = Device().used_bytes;

  auto hit = Acquire(*b, Args({"m"}));
  ASSERT_EQ(hit->modules()[0].outcome, AcquireOutcome::kHit);
  EXPECT_EQ(Device().used_bytes, used);
  EXPECT_EQ(used, 2 * TestLayout().page_bytes());
  EXPECT_EQ(ByteOf(*hit, 0), 0x5a);
  EXPECT_TRUE(hit->Valid(0));
  // The same memory, not a copy: what changes there is seen here.
  page[3] = std::byte{1};
  EXPECT_EQ(hit->modules()[0].read_pages[0][3], std::byte{1});
}

TEST_F(CacheClientTest, PageSumsComeWhenAskedFor) {
  StartDaemon();
  auto client = AttachedClient("a");
  auto lease = Acquire(*client, Args({"m", "n"}));
  ASSERT_TRUE(FillAndCommit(lease.get(), 0, 1));
  ASSERT_TRUE(FillAndCommit(lease.get(), 1, 2));
  auto args = Args({"m", "n"});
  args.want_page_sums = true;
  auto hit = Acquire(*client, args);
  for (size_t m = 0; m < 2; ++m) {
    const AcquiredModule& module = hit->modules()[m];
    ASSERT_THAT(module.page_sums, SizeIs(2));
    EXPECT_EQ(module.page_sums[1],
              PageSum({module.read_pages[1], TestLayout().page_bytes()}));
  }
}

TEST_F(CacheClientTest, ALeaseThatGoesGivesEverythingBack) {
  StartDaemon();
  auto client = AttachedClient("a");
  {
    auto lease = Acquire(*client, Args({"m", "n"}));
    ASSERT_TRUE(FillAndCommit(lease.get(), 0, 1));
  }
  // On the same stream: answered after the release and the abort.
  auto args = Args({"other"});
  args.reserve_missing = false;
  EXPECT_EQ(Acquire(*client, args)->modules()[0].outcome,
            AcquireOutcome::kMiss);
  const auto stats = server_->cache().Stats();
  EXPECT_EQ(stats.num_leases, 0u);
  EXPECT_EQ(stats.num_reservations, 0u);
  EXPECT_EQ(Device().used_bytes, 2 * TestLayout().page_bytes());
  EXPECT_EQ(Device().quarantined_bytes, 0u);
}

TEST_F(CacheClientTest, PendingBecomesAHitWhenItIsCommitted) {
  StartDaemon();
  auto a = AttachedClient("a");
  auto b = AttachedClient("b");
  auto held = Acquire(*a, Args({"m"}));
  auto waiting = Acquire(*b, Args({"m"}));
  ASSERT_EQ(waiting->modules()[0].outcome, AcquireOutcome::kPending);
  EXPECT_FALSE(waiting->Valid(0));
  EXPECT_THAT(waiting->WaitPending(0, absl::Now()),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("0")));
  EXPECT_EQ(waiting->modules()[0].outcome, AcquireOutcome::kPending);
  std::thread encoder([&] { EXPECT_TRUE(FillAndCommit(held.get(), 0, 7)); });
  PC_EXPECT_OK(waiting->WaitPending(0, Later()));
  encoder.join();
  EXPECT_EQ(waiting->modules()[0].outcome, AcquireOutcome::kHit);
  EXPECT_EQ(ByteOf(*waiting, 0), 7);
  EXPECT_TRUE(waiting->Valid(0));
}

TEST_F(CacheClientTest, PendingPassesOnWhenItsHolderGivesUp) {
  StartDaemon();
  auto a = AttachedClient("a");
  auto b = AttachedClient("b");
  auto held = Acquire(*a, Args({"m", "n"}));
  auto waiting = Acquire(*b, Args({"m", "n"}));
  held->Abort({held->modules()[0].reservation_id});
  EXPECT_FALSE(held->Valid(0));
  PC_ASSERT_OK(waiting->WaitPending(0, Later()));
  ASSERT_EQ(waiting->modules()[0].outcome, AcquireOutcome::kReserved);
  EXPECT_TRUE(FillAndCommit(waiting.get(), 0, 9));
  // A whole worker that goes.
  held.reset();
  a.reset();
  PC_ASSERT_OK(waiting->WaitPending(1, Later()));
  EXPECT_EQ(waiting->modules()[1].outcome, AcquireOutcome::kReserved);
}

TEST_F(CacheClientTest, WhatIsResolvedAfterNobodyWaitsIsGivenBack) {
  StartDaemon();
  auto a = AttachedClient("a");
  auto b = AttachedClient("b");
  auto held = Acquire(*a, Args({"m", "n"}));
  {
    auto waiting = Acquire(*b, Args({"m", "n"}));
  }
  auto early = Acquire(*b, Args({"m", "n"}));
  held.reset();  // both pass on to those who asked, one of whom is gone
  PC_ASSERT_OK(early->WaitPending(0, Later()));
  PC_ASSERT_OK(early->WaitPending(1, Later()));
  EXPECT_EQ(early->modules()[1].outcome, AcquireOutcome::kReserved);
}

TEST_F(CacheClientTest, ADaemonThatComesLateIsFound) {
  auto client = NewClient("a");
  EXPECT_FALSE(client->attached());
  EXPECT_THAT(client->Acquire(Args({"m"})),
              StatusIs(absl::StatusCode::kUnavailable,
                       AnyOf(HasSubstr("the first attempt is not over"),
                             HasSubstr("no daemon listens"))));
  EXPECT_THAT(client->WaitAttached(absl::Now()),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("not")));
  client->ReportUse({.fresh_tokens = 3});  // dropped
  StartDaemon();
  PC_ASSERT_OK(client->WaitAttached(Later()));
  EXPECT_EQ(Acquire(*client, Args({"m"}))->modules()[0].outcome,
            AcquireOutcome::kReserved);
}

TEST_F(CacheClientTest, ARestartedDaemonIsAttachedToAgain) {
  StartDaemon();
  std::atomic<int> num_attached{0};
  auto client = NewClient({.socket_path = options_.socket_path,
                           .worker_id = "a",
                           .layout = TestLayout(),
                           .acquire_timeout = kPatience,
                           .on_attached = [&] { ++num_attached; }});
  PC_ASSERT_OK(client->WaitAttached(Later()));
  auto lease = Acquire(*client, Args({"m", "n"}));
  ASSERT_TRUE(FillAndCommit(lease.get(), 0, 3));
  std::byte* writable = lease->modules()[1].write_pages[0];
  StopDaemon();
  ASSERT_TRUE(Eventually([&] { return !client->attached(); }));
  // Invalid, and harmless: the memory stays mapped.
  EXPECT_FALSE(lease->Valid(0));
  EXPECT_EQ(ByteOf(*lease, 0), 3);
  writable[0] = std::byte{1};
  EXPECT_FALSE(
      lease
          ->Commit({{.reservation_id = lease->modules()[1].reservation_id}},
                   Later())
          .ok());
  lease->ReportCorruption(0);
  lease->Abort({lease->modules()[1].reservation_id});
  EXPECT_THAT(client->Acquire(Args({"m"})),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("daemon")));

  StartDaemon();
  lease.reset();  // a new session says that nothing of the old one is used
  PC_ASSERT_OK(client->WaitAttached(Later()));
  EXPECT_TRUE(Eventually([&] { return num_attached == 2; }));
  auto again = Acquire(*client, Args({"m", "n"}));
  EXPECT_EQ(again->modules()[0].outcome, AcquireOutcome::kReserved);
  EXPECT_EQ(again->modules()[0].miss_reason, CacheMissReason::kNotResident);
  EXPECT_EQ(again->modules()[1].miss_reason, CacheMissReason::kNeverSeen);
}

TEST_F(CacheClientTest, AWaiterWakesWhenTheDaemonGoes) {
  StartDaemon();
  auto a = AttachedClient("a");
  auto held = Acquire(*a, Args({"m"}));
  // Of the same session, so that nothing passes on at its end.
  auto waiting = Acquire(*a, Args({"m"}));
  std::thread stopper([&] { StopDaemon(); });
  EXPECT_THAT(waiting->WaitPending(0, Later()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("ended")));
  stopper.join();
}

TEST_F(CacheClientTest, AWrongLayoutIsToldAndTriedAgain) {
  options_.pool.segment_bytes = 1 << 20;
  StartDaemon();
  KvLayout huge = TestLayout();
  huge.num_layers = 4096;  // a page of 4 MiB in segments of 1 MiB
  auto client = NewClient(
      {.socket_path = options_.socket_path, .worker_id = "a", .layout = huge});
  EXPECT_FALSE(
      client->WaitAttached(absl::Now() + absl::Milliseconds(300)).ok());
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(client->WaitAttached(absl::Now()).message(),
                             "INVALID_ARGUMENT");
  }));
}

TEST_F(CacheClientTest, ManyThreadsAcquireAtOnce) {
  StartDaemon();
  auto client = AttachedClient("a");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        auto lease = Acquire(*client, Args({absl::StrCat(t, ".", i % 5)}));
        ASSERT_NE(lease, nullptr);
        if (lease->modules()[0].outcome == AcquireOutcome::kReserved) {
          EXPECT_TRUE(FillAndCommit(lease.get(), 0, t));
        } else {
          EXPECT_EQ(ByteOf(*lease, 0), t);
        }
        EXPECT_TRUE(lease->Valid(0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(server_->cache().Stats().commits, 20u);
}

TEST_F(CacheClientTest, OptionsAreChecked) {
  EXPECT_FALSE(CacheClient::Create({.layout = TestLayout()}).ok());
  EXPECT_FALSE(CacheClient::Create({.socket_path = "x"}).ok());
  EXPECT_FALSE(CacheClient::Create({.socket_path = "x",
                                    .layout = TestLayout(),
                                    .acquire_timeout = absl::ZeroDuration()})
                   .ok());
  EXPECT_FALSE(RegistryClient::Create({}).ok());
}

class RegistryClientTest : public CacheClientTest {
 protected:
  void SetUp() override {
    auto client = RegistryClient::Create(
        {.socket_path = options_.socket_path, .timeout = kPatience});
    PC_ASSERT_OK(client);
    client_ = *std::move(client);
  }
  absl::StatusOr<node::v1::PutSchemaResponse> Put(const std::string& name,
                                                  const std::string& text) {
    node::v1::PutSchemaRequest request;
    request.set_name(name);
    request.set_text(text);
    return client_->PutSchema(request);
  }
  std::unique_ptr<RegistryClient> client_;
};

TEST_F(RegistryClientTest, SchemasGoInAndComeOut) {
  StartDaemon();
  node::v1::PutSchemaRequest request;
  request.set_name("s");
  request.set_text(std::string(3 << 20, 't'));  // gRPC's own limit is 4 MiB
  request.mutable_policy()->mutable_ttl()->set_seconds(90);
  (*request.mutable_module_policies())["m"].set_pin(true);
  const auto put = client_->PutSchema(request);
  PC_ASSERT_OK(put);
  EXPECT_TRUE(put->created());
  PC_ASSERT_OK(Put("s", "second"));
  const auto first = client_->GetSchema("s", 1);
  PC_ASSERT_OK(first);
  EXPECT_EQ(first->text(), request.text());
  EXPECT_EQ(first->policy().ttl().seconds(), 90);
  EXPECT_TRUE(first->module_policies().at("m").pin());
  EXPECT_EQ(client_->GetSchema("s", 0)->revision(), 2u);
  const auto list = client_->ListSchemas({});
  PC_ASSERT_OK(list);
  EXPECT_THAT(list->schemas(), SizeIs(1));
  PC_EXPECT_OK(client_->DeleteSchema("s"));
  EXPECT_THAT(client_->GetSchema("s", 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"s\"")));
}

TEST_F(RegistryClientTest, BadPoliciesAreRefused) {
  StartDaemon();
  node::v1::PutSchemaRequest request;
  request.set_name("s");
  request.mutable_policy()->mutable_ttl()->set_seconds(-1);
  EXPECT_THAT(client_->PutSchema(request),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ttl")));
}

TEST_F(RegistryClientTest, WithoutADaemonItSaysSoAndFindsItLater) {
  EXPECT_THAT(Put("s", "t"), StatusIs(absl::StatusCode::kUnavailable,
                                      HasSubstr("start promptcache-daemon")));
  StartDaemon();
  EXPECT_TRUE(Eventually([&] { return Put("s", "t").ok(); }));
  StopDaemon();
  EXPECT_THAT(client_->GetSchema("s", 0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("daemon")));
  StartDaemon();
  EXPECT_TRUE(Eventually([&] { return client_->GetSchema("s", 0).ok(); }));
}

TEST_F(RegistryClientTest, WorkersHearOfChanges) {
  StartDaemon();
  Mutex mu;
  std::vector<std::pair<std::string, uint64_t>> changes;
  auto client = NewClient(
      {.socket_path = options_.socket_path,
       .worker_id = "a",
       .layout = TestLayout(),
       .on_schema_changed = [&](const std::string& name, uint64_t revision) {
         MutexLock lock(&mu);
         changes.emplace_back(name, revision);
       }});
  PC_ASSERT_OK(client->WaitAttached(Later()));
  PC_ASSERT_OK(Put("s", "one"));
  PC_ASSERT_OK(Put("s", "two"));
  PC_ASSERT_OK(client_->DeleteSchema("s"));
  ASSERT_TRUE(Eventually([&] {
    MutexLock lock(&mu);
    return changes.size() == 3;
  }));
  MutexLock lock(&mu);
  EXPECT_THAT(changes, ElementsAre(std::pair("s", 1u), std::pair("s", 2u),
                                   std::pair("s", 0u)));
}

TEST_F(CacheClientTest, APolicyReachesModulesThatAreThere) {
  StartDaemon();
  auto client = AttachedClient("a");
  auto lease = Acquire(*client, Args({"m", "n"}));
  ASSERT_TRUE(FillAndCommit(lease.get(), 0, 1));
  EXPECT_THAT(client->SetPolicy({}), IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(
      client->SetPolicy({{.key = Sha256Of("m"), .ttl = absl::Seconds(90)},
                         {.key = Sha256Of("n"), .pin = true}}),  // not there
      IsOkAndHolds(ElementsAre(false, false)));
  const auto info = [&] { return server_->cache().Get(Sha256Of("m").ToHex()); };
  EXPECT_EQ(info()->metadata.policy.ttl, absl::Seconds(90));
  EXPECT_FALSE(info()->pinned);
  EXPECT_THAT(client->SetPolicy({{.key = Sha256Of("m"), .pin = true}}),
              IsOkAndHolds(ElementsAre(false)));
  EXPECT_TRUE(info()->pinned);
  PC_ASSERT_OK(server_->registry().modules().Flush());
  const auto records = server_->registry().LoadModules();
  PC_ASSERT_OK(records);
  ASSERT_THAT(*records, SizeIs(1));
  EXPECT_TRUE(records->at(0).policy.pin);
  StopDaemon();
  EXPECT_FALSE(client->SetPolicy({{.key = Sha256Of("m")}}).ok());
}

TEST_F(CacheClientTest, ARefusedPinIsTold) {
  options_.cache.pin_budget_bytes = 0;
  StartDaemon();
  auto client = AttachedClient("a");
  auto lease = Acquire(*client, Args({"m", "n"}));
  ASSERT_TRUE(FillAndCommit(lease.get(), 0, 1));
  EXPECT_FALSE(lease->modules()[0].pin_refused);
  ASSERT_TRUE(FillAndCommit(lease.get(), 1, 1, /*pin=*/true));
  EXPECT_TRUE(lease->modules()[1].pin_refused);
  EXPECT_FALSE(lease->modules()[0].pin_refused);
  EXPECT_TRUE(lease->Valid(1));
}

}  // namespace
}  // namespace promptcache::worker
