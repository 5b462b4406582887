// What operators ask, over TCP and over the Unix socket.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <future>
#include <set>

#include "cache_daemon/service/socket_lock.h"
#include "common/digest.h"
#include "common/rpc/grpc_status.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/cache_daemon/service/daemon_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class CacheServiceTest : public DaemonFixture {
 protected:
  void SetUp() override {
    StartDaemon();
    stub_ = v1::CacheService::NewStub(TcpChannel());
    session_ = std::make_unique<RawSession>(NodeChannel());
    ASSERT_TRUE(
        session_->Hello(TakeToken(options_.socket_path), "w").has_value());
  }
  void TearDown() override {
    session_.reset();
    DaemonFixture::TearDown();
  }
  // Modules "0", "1", …; the session keeps a lease over them.
  void CommitModules(int num_modules) {
    const auto reserved =
        session_->Ask(AcquireOf(1, num_modules, 16, true)).acquire();
    session_->Ask(CommitOf(2, reserved, 16));
    lease_id_ = reserved.lease_id();
  }
  void ReleaseModules() {
    node::v1::SessionRequest release;
    release.mutable_release()->set_lease_id(lease_id_);
    session_->Write(release);
    session_->Ask(AcquireOf(3, 0, 16, false));  // answered after it
  }
  static std::string Key(int module) {
    return Sha256Of(absl::StrCat(module)).ToHex();
  }
  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> Call(Method method, const Request& request) {
    grpc::ClientContext context;
    SetDeadline(&context);
    Response response;
    const absl::Status status = rpc::FromGrpcStatus(
        (stub_.get()->*method)(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }
  absl::StatusOr<v1::CacheStats> Stats() {
    return Call<v1::CacheStats>(&v1::CacheService::Stub::GetStats,
                                v1::GetStatsRequest());
  }

  std::unique_ptr<v1::CacheService::Stub> stub_;
  std::unique_ptr<RawSession> session_;
  uint64_t lease_id_ = 0;
};

TEST_F(CacheServiceTest, StatisticsAddUp) {
  CommitModules(3);
  session_->Ask(AcquireOf(5, 4, 16, /*reserve=*/false));
  const auto stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_EQ(stats->daemon_id(), server_->daemon_id());
  EXPECT_GT(stats->start_time().seconds(), 0);
  EXPECT_EQ(stats->commits(), 3u);
  EXPECT_EQ(stats->hit_lookups(), 3u);
  EXPECT_EQ(stats->miss_lookups(), 4u);
  EXPECT_EQ(stats->hit_tokens(), 48u);
  EXPECT_EQ(stats->num_sessions(), 1u);
  const v1::TierStats& device = stats->tiers(0);
  EXPECT_EQ(device.tier(), v1::TIER_DEVICE);
  EXPECT_EQ(device.capacity_bytes(), 2u << 20);
  EXPECT_EQ(device.used_bytes(), 3 * TestLayout().page_bytes());
  EXPECT_EQ(device.leased_bytes(), device.used_bytes());
  EXPECT_THAT(device.kind(), HasSubstr("memfd"));
  EXPECT_EQ(device.hit_lookups(), 3u);
  EXPECT_EQ(device.hit_tokens(), 48u);
  EXPECT_THAT(device.evictions(), SizeIs(stats->evictions_size()));
  EXPECT_EQ(device.modules_size(), stats->modules_size());
  for (const v1::CountByMissReason& misses : stats->misses()) {
    EXPECT_EQ(misses.fields_size(),
              misses.reason() == v1::MISS_REASON_IDENTITY_DIFFERS ? 7 : 0);
  }
  uint64_t committed = 0;
  for (const auto& count : stats->modules()) {
    if (count.state() == v1::MODULE_STATE_COMMITTED) {
      committed = count.num_modules();
    }
  }
  EXPECT_EQ(committed, 3u);
}

TEST_F(CacheServiceTest, ListsEveryModuleOnceInPages) {
  CommitModules(7);
  v1::ListModulesRequest request;
  request.set_page_size(3);
  std::set<std::string> keys;
  do {
    const auto page = Call<v1::ListModulesResponse>(
        &v1::CacheService::Stub::ListModules, request);
    PC_ASSERT_OK(page);
    for (const v1::Module& module : page->modules()) {
      EXPECT_EQ(module.schema(), "schema");
      EXPECT_EQ(module.state(), v1::MODULE_STATE_COMMITTED);
      EXPECT_TRUE(keys.insert(module.key()).second);
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(keys, SizeIs(7));
  request.set_page_token("garbage");
  const auto bad = Call<v1::ListModulesResponse>(
      &v1::CacheService::Stub::ListModules, request);
  EXPECT_THAT(bad, StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("page_token")));
  EXPECT_EQ(rpc::GetFieldViolations(bad.status()).at(0).field, "page_token");
}

TEST_F(CacheServiceTest, InspectsOneModule) {
  CommitModules(1);
  v1::GetModuleRequest request;
  request.set_key(Key(0).substr(0, 10));
  const auto module =
      Call<v1::Module>(&v1::CacheService::Stub::GetModule, request);
  PC_ASSERT_OK(module);
  EXPECT_EQ(module->key(), Key(0));
  EXPECT_EQ(module->path(), "0");
  EXPECT_EQ(module->num_tokens(), 16u);
  EXPECT_EQ(module->num_leases(), 1u);
  EXPECT_GT(module->commit_time().seconds(), 1'700'000'000);
  EXPECT_GT(module->expire_time().seconds(), module->commit_time().seconds());
  request.set_key(Key(99));
  EXPECT_THAT(
      Call<v1::Module>(&v1::CacheService::Stub::GetModule, request),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(Key(99).substr(0, 8))));
}

TEST_F(CacheServiceTest, EvictsWhatIsFreeNowAndWhatIsLeasedLater) {
  CommitModules(2);
  v1::EvictModulesRequest request;
  request.mutable_filter()->add_keys(Key(0));
  auto evicted = Call<v1::EvictModulesResponse>(
      &v1::CacheService::Stub::EvictModules, request);
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_deferred(), 1u);
  EXPECT_EQ(Device().used_bytes, 2 * TestLayout().page_bytes());
  ReleaseModules();
  EXPECT_EQ(Device().used_bytes, TestLayout().page_bytes());
  request.mutable_filter()->Clear();
  evicted = Call<v1::EvictModulesResponse>(
      &v1::CacheService::Stub::EvictModules, request);
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_evicted(), 0u);  // an empty filter selects nothing
  request.mutable_filter()->set_all(true);
  evicted = Call<v1::EvictModulesResponse>(
      &v1::CacheService::Stub::EvictModules, request);
  PC_ASSERT_OK(evicted);
  EXPECT_EQ(evicted->num_evicted(), 1u);
  EXPECT_EQ(Device().used_bytes, 0u);
}

TEST_F(CacheServiceTest, PinsAreKeptByTheRegistry) {
  CommitModules(2);
  v1::PinModulesRequest request;
  request.mutable_filter()->add_keys(Key(1));
  auto pinned = Call<v1::PinModulesResponse>(
      &v1::CacheService::Stub::PinModules, request);
  PC_ASSERT_OK(pinned);
  EXPECT_EQ(pinned->num_changed(), 1u);
  EXPECT_EQ(pinned->pinned_bytes(), TestLayout().page_bytes());
  EXPECT_EQ(pinned->pin_budget_bytes(), options_.pool.device_bytes / 2);
  PC_ASSERT_OK(server_->registry().modules().Flush());
  const auto known = server_->registry().LoadModules();
  PC_ASSERT_OK(known);
  ASSERT_THAT(*known, SizeIs(2));
  for (const ModuleRecord& module : *known) {
    EXPECT_EQ(module.policy.pin, module.key.ToHex() == Key(1));
    EXPECT_EQ(module.num_bytes, TestLayout().page_bytes());
  }
  request.set_unpin(true);
  pinned = Call<v1::PinModulesResponse>(&v1::CacheService::Stub::PinModules,
                                        request);
  PC_ASSERT_OK(pinned);
  EXPECT_EQ(pinned->pinned_bytes(), 0u);
}

TEST_F(CacheServiceTest, AnEvictedPinIsNotBackAfterARestart) {
  CommitModules(2);
  v1::PinModulesRequest pin;
  pin.mutable_filter()->set_all(true);
  PC_ASSERT_OK(
      Call<v1::PinModulesResponse>(&v1::CacheService::Stub::PinModules, pin));
  v1::EvictModulesRequest evict;
  evict.mutable_filter()->add_keys(Key(0));
  PC_ASSERT_OK(Call<v1::EvictModulesResponse>(
      &v1::CacheService::Stub::EvictModules, evict));
  session_.reset();
  StopDaemon();
  StartDaemon();
  EXPECT_FALSE(server_->cache().Get(Key(0))->pinned);
  EXPECT_TRUE(server_->cache().Get(Key(1))->pinned);
}

TEST_F(CacheServiceTest, PoliciesOfASchemaReachItsModules) {
  CommitModules(2);  // of "schema", with paths "0" and "1"
  auto node = node::v1::NodeService::NewStub(NodeChannel());
  node::v1::PutSchemaRequest put;
  put.set_name("schema");
  put.set_text("text");
  const auto put_schema = [&] {
    grpc::ClientContext context;
    SetDeadline(&context);
    node::v1::PutSchemaResponse response;
    return node->PutSchema(&context, put, &response).ok();
  };
  ASSERT_TRUE(put_schema());
  const auto get = [&](int m) { return *server_->cache().Get(Key(m)); };
  EXPECT_EQ(get(0).metadata.policy, CachePolicy());
  put.mutable_policy()->mutable_ttl()->set_seconds(50);
  (*put.mutable_module_policies())["1"].set_pin(true);
  ASSERT_TRUE(put_schema());  // the same text
  EXPECT_EQ(get(0).metadata.policy, CachePolicy{.ttl = absl::Seconds(50)});
  EXPECT_FALSE(get(0).pinned);
  EXPECT_EQ(get(1).metadata.policy, CachePolicy{.pin = true});
  EXPECT_TRUE(get(1).pinned);
  // Without policies, those that were set stay.
  put.clear_policy();
  put.clear_module_policies();
  put.set_text("other text");
  ASSERT_TRUE(put_schema());
  EXPECT_TRUE(get(1).pinned);

  grpc::ClientContext context;
  SetDeadline(&context);
  v1::DeleteSchemaRequest remove;
  remove.set_name("schema");
  v1::DeleteSchemaResponse removed;
  ASSERT_TRUE(node->DeleteSchema(&context, remove, &removed).ok());
  EXPECT_FALSE(get(1).pinned);
  session_.reset();
  StopDaemon();
  StartDaemon();
  EXPECT_FALSE(get(1).pinned);
}

TEST_F(CacheServiceTest, WatchersSeeWhatHappens) {
  grpc::ClientContext context;
  SetDeadline(&context);
  auto events = stub_->WatchEvents(&context, v1::WatchEventsRequest());
  events->WaitForInitialMetadata();  // from now on nothing is lost
  CommitModules(1);
  auto node = node::v1::NodeService::NewStub(NodeChannel());
  grpc::ClientContext put_context;
  node::v1::PutSchemaRequest put;
  put.set_name("travel");
  node::v1::PutSchemaResponse response;
  ASSERT_TRUE(node->PutSchema(&put_context, put, &response).ok());
  v1::CacheEvent event;
  ASSERT_TRUE(events->Read(&event));
  EXPECT_EQ(event.kind(), v1::CacheEvent::KIND_COMMITTED);
  EXPECT_EQ(event.key(), Key(0));
  ASSERT_TRUE(events->Read(&event));
  EXPECT_EQ(event.kind(), v1::CacheEvent::KIND_SCHEMA_CHANGED);
  EXPECT_EQ(event.schema(), "travel");
  // A reader does not keep the daemon from stopping.
  StopDaemon();
  while (events->Read(&event)) {
    EXPECT_EQ(event.kind(), v1::CacheEvent::KIND_SESSION_CLOSED);
  }
  EXPECT_FALSE(events->Finish().ok());
}

TEST_F(CacheServiceTest, HealthIsToldWithoutOurProtos) {
  grpc::GenericStub health(TcpChannel());
  grpc::ClientContext context;
  SetDeadline(&context);
  const grpc::Slice whole_server;  // an empty message
  const grpc::ByteBuffer request(&whole_server, 1);
  grpc::ByteBuffer response;
  std::promise<grpc::Status> done;
  health.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request,
                   &response,
                   [&](grpc::Status status) { done.set_value(status); });
  ASSERT_TRUE(done.get_future().get().ok());
  grpc::Slice slice;
  ASSERT_TRUE(response.DumpToSingleSlice(&slice).ok());
  // HealthCheckResponse {status: SERVING}
  EXPECT_EQ(std::string(slice.begin(), slice.end()), "\x08\x01");
}

TEST_F(CacheServiceTest, IsServedOnTheUnixSocketToo) {
  stub_ = v1::CacheService::NewStub(NodeChannel());
  PC_EXPECT_OK(Stats());
}

TEST_F(CacheServiceTest, WorkersServicesAreNotOnTcp) {
  RawSession session(TcpChannel());
  EXPECT_EQ(session.Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(CacheServiceTest, TheSocketIsForOwnerAndGroup) {
  struct stat info{};
  ASSERT_EQ(::stat(options_.socket_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777u, 0660u);
}

TEST(DaemonOptionsTest, OnlyLoopbackUnlessAskedFor) {
  DaemonServer::Options options{.socket_path = "x", .listen = "0.0.0.0:7071"};
  options.registry.path = "y";
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("--insecure_listen")));
  options.insecure_listen = true;
  PC_EXPECT_OK(options.Validate());
  options = {.socket_path = "x", .listen = ""};
  options.registry.path = "y";
  PC_EXPECT_OK(options.Validate());
  options.socket_path = "";
  EXPECT_FALSE(options.Validate().ok());
}

TEST(SocketFolderTest, SomebodyElsesFolderIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a folder away";
  const TempDir dir;
  ASSERT_EQ(::chown(dir.path().c_str(), 54321, 54321), 0);
  EXPECT_THAT(MakeSocketFolder(dir.path() + "/d.sock"),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       HasSubstr("belongs to user 54321")));
  ASSERT_EQ(::chown(dir.path().c_str(), 0, 0), 0);
}

TEST(SocketLockTest, IsHeldOnceAndGoesWithItsHolder) {
  const TempDir dir;
  const std::string path = dir.path() + "/d.sock";
  {
    const auto lock = LockSocket(path);
    PC_ASSERT_OK(lock);
    EXPECT_THAT(LockSocket(path),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr(absl::StrCat("process ", ::getpid()))));
  }
  PC_EXPECT_OK(LockSocket(path));
}

}  // namespace
}  // namespace promptcache::daemon
