// Sessions of workers, over the real sockets.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/digest.h"
#include "tests/cache_daemon/service/daemon_fixture.h"

namespace promptcache::daemon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;
using ::testing::UnorderedElementsAre;

class SessionTest : public DaemonFixture {
 protected:
  std::string Token() const { return TakeToken(options_.socket_path); }
  std::unique_ptr<RawSession> Open(const std::string& worker_id) {
    auto session = std::make_unique<RawSession>(NodeChannel());
    EXPECT_TRUE(session->Hello(Token(), worker_id).has_value());
    return session;
  }
};

TEST_F(SessionTest, AWelcomeDescribesTheMemory) {
  StartDaemon();
  RawSession session(NodeChannel());
  const auto welcome = session.Hello(Token(), "w");
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->page_bytes(), TestLayout().page_bytes());
  EXPECT_THAT(welcome->segment_ids(), ElementsAre(0, 1));
  EXPECT_THAT(welcome->segment_tiers(),
              ElementsAre(v1::TIER_DEVICE, v1::TIER_DEVICE));
  EXPECT_GE(welcome->generations_stride(),
            (1u << 20) / TestLayout().page_bytes());
  EXPECT_EQ(welcome->daemon_id(), server_->daemon_id());
  EXPECT_NE(welcome->session_id(), 0u);
  EXPECT_TRUE(welcome->joined_paths());
}

TEST_F(SessionTest, AWelcomeLeavesOutOtherDevices) {
  const std::unique_ptr<gpu::Device> devices[] = {gpu::NewHostDevice(),
                                                  gpu::NewHostDevice()};
  options_.pool.devices = {devices[0].get(), devices[1].get()};
  options_.pool.host_bytes = 1 << 20;
  StartDaemon();
  {
    RawSession session(NodeChannel());
    const auto welcome = session.Hello(Token(), "w");
    ASSERT_TRUE(welcome.has_value());
    EXPECT_THAT(welcome->segment_ids(), ElementsAre(0, 1, 4));
    EXPECT_THAT(welcome->segment_tiers(),
                ElementsAre(v1::TIER_DEVICE, v1::TIER_DEVICE, v1::TIER_HOST));
  }
  StopDaemon();  // before its devices
}

TEST_F(SessionTest, NoTokenNoSession) {
  StartDaemon();
  const std::string used = Token();
  RawSession first(NodeChannel());
  ASSERT_TRUE(first.Hello(used, "w").has_value());
  for (const std::string& token : {used, std::string(16, 'x'), std::string()}) {
    RawSession session(NodeChannel());
    EXPECT_FALSE(session.Hello(token, "w2").has_value());
    const grpc::Status status = session.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(status.error_message(), HasSubstr("token"));
  }
  EXPECT_EQ(server_->cache().Stats().num_sessions, 1u);
}

TEST_F(SessionTest, TheFirstMessageMustBeAHello) {
  StartDaemon();
  RawSession session(NodeChannel());
  session.Write(AcquireOf(1, 1, 16, true));
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("hello"));
}

TEST_F(SessionTest, ASecondHelloEndsTheSession) {
  StartDaemon();
  auto session = Open("w");
  EXPECT_FALSE(session->Hello(Token(), "w").has_value());
  EXPECT_EQ(session->Finish().error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(
      Eventually([&] { return server_->cache().Stats().num_sessions == 0; }));
}

TEST_F(SessionTest, AnotherProtocolVersionIsRefusedWithBothNumbers) {
  StartDaemon();
  RawSession session(NodeChannel());
  node::v1::SessionRequest request;
  request.mutable_hello()->set_protocol_version(9);
  session.Write(request);
  EXPECT_THAT(session.Finish().error_message(),
              HasSubstr("protocol version 9, this daemon speaks 1"));
}

TEST_F(SessionTest, ReservedThenCommittedThenHit) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(AcquireOf(1, 2, 20, true)).acquire();
  EXPECT_EQ(reserved.request_id(), 1u);
  EXPECT_THAT(reserved.outcomes(), ElementsAre(node::v1::OUTCOME_RESERVED,
                                               node::v1::OUTCOME_RESERVED));
  EXPECT_THAT(reserved.miss_reasons(), ElementsAre(v1::MISS_REASON_NEVER_SEEN,
                                                   v1::MISS_REASON_NEVER_SEEN));
  const auto commit = session->Ask(CommitOf(2, reserved, 20)).commit();
  EXPECT_EQ(commit.request_id(), 2u);
  EXPECT_THAT(commit.committed(), ElementsAre(true, true));

  auto other = Open("w2");
  const uint64_t used = Device().used_bytes;
  const auto hit = other->Ask(AcquireOf(7, 2, 20, true)).acquire();
  EXPECT_THAT(hit.outcomes(),
              ElementsAre(node::v1::OUTCOME_HIT, node::v1::OUTCOME_HIT));
  EXPECT_EQ(hit.run_first_pages(0), reserved.run_first_pages(0));
  EXPECT_EQ(Device().used_bytes, used);
  EXPECT_EQ(used, 4 * TestLayout().page_bytes());
}

TEST_F(SessionTest, AnAcquireEndsLeasesFirst) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(AcquireOf(1, 1, 16, true)).acquire();
  session->Ask(CommitOf(2, reserved, 16));
  auto again = AcquireOf(3, 1, 16, false);
  again.mutable_acquire()->add_released_leases(reserved.lease_id());
  const auto held = session->Ask(again).acquire();
  EXPECT_NE(held.lease_id(), reserved.lease_id());
  EXPECT_EQ(server_->cache().Stats().num_leases, 1u);

  // One that is not there is told by itself; the Acquire is answered.
  again.mutable_acquire()->set_request_id(4);
  const auto failed = session->Ask(again).request_failed();
  EXPECT_EQ(failed.request_id(), 0u);
  EXPECT_EQ(failed.code(), static_cast<int>(absl::StatusCode::kNotFound));
  const auto last = session->Read().acquire();
  EXPECT_EQ(last.request_id(), 4u);
  EXPECT_EQ(server_->cache().Stats().num_leases, 2u);

  // Nor are they lost with an Acquire that is refused.
  auto refused = AcquireOf(5, 2, 16, false);
  refused.mutable_acquire()->mutable_keys()->resize(40);
  refused.mutable_acquire()->add_released_leases(held.lease_id());
  refused.mutable_acquire()->add_released_leases(last.lease_id());
  EXPECT_EQ(session->Ask(refused).request_failed().request_id(), 5u);
  EXPECT_EQ(server_->cache().Stats().num_leases, 0u);
}

TEST_F(SessionTest, BadRequestsAreToldWithNumbersAndTheSessionGoesOn) {
  StartDaemon();
  auto session = Open("w");
  auto short_keys = AcquireOf(5, 2, 16, true);
  short_keys.mutable_acquire()->mutable_keys()->resize(40);
  auto answer = session->Ask(short_keys);
  EXPECT_EQ(answer.request_failed().request_id(), 5u);
  EXPECT_EQ(answer.request_failed().code(), 3);
  EXPECT_THAT(answer.request_failed().message(),
              HasSubstr("40 bytes, 2 keys have 64"));

  answer = session->Ask(AcquireOf(6, 1, 0, true));
  EXPECT_EQ(answer.request_failed().request_id(), 6u);

  const auto reserved = session->Ask(AcquireOf(7, 1, 40, true)).acquire();
  auto commit = CommitOf(8, reserved, 40);
  commit.mutable_commit()->mutable_page_sums()->RemoveLast();
  answer = session->Ask(commit);
  EXPECT_THAT(answer.request_failed().message(),
              HasSubstr("page_sums has 2 entries, 3 are due"));
  EXPECT_EQ(session->Ask(CommitOf(9, reserved, 40)).commit().committed_size(),
            1);
}

// "a", two bytes of one character, "bc".
node::v1::SessionRequest WithJoinedPaths(std::vector<uint32_t> path_bytes) {
  auto request = AcquireOf(1, 3, 16, true);
  request.mutable_acquire()->clear_paths();
  request.mutable_acquire()->set_joined_paths(
      "a\xc3\xa9"
      "bc");
  for (const uint32_t num_bytes : path_bytes) {
    request.mutable_acquire()->add_path_bytes(num_bytes);
  }
  return request;
}

TEST_F(SessionTest, PathsMayComeJoined) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(WithJoinedPaths({1, 2, 2})).acquire();
  auto commit = CommitOf(2, reserved, 16);
  for (auto& module : *commit.mutable_commit()->mutable_modules()) {
    module.clear_path();  // then it has that of the Acquire
  }
  session->Ask(commit);
  std::vector<std::string> paths;
  for (const ModuleInfo& module : server_->cache().List({})->modules) {
    paths.push_back(module.metadata.path);
  }
  EXPECT_THAT(paths, UnorderedElementsAre("a", "\xc3\xa9", "bc"));
}

TEST_F(SessionTest, JoinedPathsThatAreNoneAreRefused) {
  StartDaemon();
  auto session = Open("w");
  for (const std::vector<uint32_t>& path_bytes : {std::vector<uint32_t>{1, 2},
                                                  {1, 2, 1},
                                                  {1, 2, 3},
                                                  {2, 1, 2},
                                                  {1, 2, 0xffffffff}}) {
    EXPECT_EQ(session->Ask(WithJoinedPaths(path_bytes)).request_failed().code(),
              3)
        << path_bytes.size() << " " << path_bytes[1];
  }
  EXPECT_TRUE(session->Ask(WithJoinedPaths({0, 5, 0})).has_acquire());
}

TEST_F(SessionTest, ACommitOfNothingThatIsHeldIsNoCommit) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(AcquireOf(1, 1, 16, true)).acquire();
  auto commit = CommitOf(2, reserved, 16);
  ASSERT_EQ(session->Ask(commit).commit().committed(0), true);
  EXPECT_EQ(session->Ask(commit).commit().committed(0), false);
}

TEST_F(SessionTest, PendingIsResolvedByCommitAndByAbort) {
  StartDaemon();
  auto holder = Open("a");
  auto waiter = Open("b");
  const auto reserved = holder->Ask(AcquireOf(1, 2, 16, true)).acquire();
  const auto pending = waiter->Ask(AcquireOf(4, 2, 16, true)).acquire();
  EXPECT_THAT(pending.outcomes(), ElementsAre(node::v1::OUTCOME_PENDING,
                                              node::v1::OUTCOME_PENDING));
  node::v1::SessionRequest abort;
  abort.mutable_abort()->add_reservation_ids(reserved.reservation_ids(1));
  holder->Write(abort);
  const auto passed_on = waiter->Read().pending_resolved();
  EXPECT_EQ(passed_on.request_id(), 4u);
  EXPECT_EQ(passed_on.index(), 1u);
  EXPECT_THAT(passed_on.reply().outcomes(),
              ElementsAre(node::v1::OUTCOME_RESERVED));
  EXPECT_NE(passed_on.reply().reservation_ids(0), 0u);

  auto rest = reserved;
  rest.set_reservation_ids(1, 0);
  holder->Ask(CommitOf(2, rest, 16));
  const auto committed = waiter->Read().pending_resolved();
  EXPECT_EQ(committed.index(), 0u);
  EXPECT_THAT(committed.reply().outcomes(), ElementsAre(node::v1::OUTCOME_HIT));
  EXPECT_NE(committed.reply().lease_id(), 0u);
}

TEST_F(SessionTest, AReservationPassesOnWhenItsHolderVanishes) {
  StartDaemon();
  auto holder = Open("a");
  auto waiter = Open("b");
  holder->Ask(AcquireOf(1, 1, 16, true));
  waiter->Ask(AcquireOf(4, 1, 16, true));
  holder->Cancel();
  EXPECT_THAT(waiter->Read().pending_resolved().reply().outcomes(),
              ElementsAre(node::v1::OUTCOME_RESERVED));
}

TEST_F(SessionTest, WhatAVanishedSessionHeldIsKeptUntilItsWorkerIsBack) {
  StartDaemon();
  {
    auto session = Open("w");
    session->Ask(AcquireOf(1, 3, 16, true));
    session->Cancel();
  }
  ASSERT_TRUE(
      Eventually([&] { return server_->cache().Stats().num_sessions == 0; }));
  // Its process lives: it may still be writing.
  EXPECT_EQ(Device().quarantined_bytes, 3 * TestLayout().page_bytes());
  auto again = Open("w");
  EXPECT_EQ(Device().used_bytes, 0u);
}

TEST_F(SessionTest, AHalfClosedSessionEndsWell) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(AcquireOf(1, 1, 16, true)).acquire();
  session->Ask(CommitOf(2, reserved, 16));
  ASSERT_EQ(server_->cache().Stats().num_leases, 1u);
  session->HalfClose();
  EXPECT_TRUE(session->Finish().ok());
  // The client's call may end a moment before the daemon's side of it.
  ASSERT_TRUE(
      Eventually([&] { return server_->cache().Stats().num_sessions == 0; }));
  EXPECT_EQ(server_->cache().Stats().num_leases, 0u);
}

TEST_F(SessionTest, AClientThatDoesNotReadIsCutOff) {
  options_.max_session_queue_bytes = 32 << 10;
  StartDaemon();
  auto deaf = Open("deaf");
  const auto request = AcquireOf(1, 2000, 16, /*reserve=*/false);
  // What the connection buffers comes on top, and is bounded as well.
  int num_written = 0;
  while (num_written < 5000 && deaf->Write(request)) ++num_written;
  EXPECT_LT(num_written, 5000);
  EXPECT_FALSE(deaf->Finish().ok());
  ASSERT_TRUE(
      Eventually([&] { return server_->cache().Stats().num_sessions == 0; }));
  auto other = Open("other");
  EXPECT_TRUE(other->Ask(AcquireOf(1, 1, 16, true)).has_acquire());
}

TEST_F(SessionTest, TooManySessionsAreRefused) {
  options_.max_sessions = 1;
  StartDaemon();
  auto first = Open("a");
  RawSession second(NodeChannel());
  EXPECT_FALSE(second.Hello(Token(), "b").has_value());
  EXPECT_EQ(second.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(SessionTest, SchemaChangesReachEverySession) {
  StartDaemon();
  auto a = Open("a");
  auto b = Open("b");
  auto stub = node::v1::NodeService::NewStub(NodeChannel());
  node::v1::PutSchemaRequest put;
  put.set_name("travel");
  put.set_text("one");
  for (int i = 0; i < 2; ++i) {  // the second changes nothing
    grpc::ClientContext context;
    SetDeadline(&context);
    node::v1::PutSchemaResponse response;
    ASSERT_TRUE(stub->PutSchema(&context, put, &response).ok());
    EXPECT_EQ(response.created(), i == 0);
    EXPECT_EQ(response.schema().revision(), 1u);
  }
  {
    grpc::ClientContext context;
    SetDeadline(&context);
    v1::DeleteSchemaRequest remove;
    remove.set_name("travel");
    v1::DeleteSchemaResponse response;
    ASSERT_TRUE(stub->DeleteSchema(&context, remove, &response).ok());
  }
  for (RawSession* session : {a.get(), b.get()}) {
    const auto changed = session->Read().schema_changed();
    EXPECT_EQ(changed.name(), "travel");
    EXPECT_EQ(changed.revision(), 1u);
    EXPECT_EQ(session->Read().schema_changed().revision(), 0u);
  }
}

TEST_F(SessionTest, AReportOfACorruptPageIsChecked) {
  StartDaemon();
  auto session = Open("w");
  const auto reserved = session->Ask(AcquireOf(1, 2, 16, true)).acquire();
  auto commit = CommitOf(2, reserved, 16);
  commit.mutable_commit()->set_page_sums(1, 12345);  // not what lies there
  session->Ask(commit);
  for (int i = 0; i < 2; ++i) {
    node::v1::SessionRequest report;
    report.mutable_report_corruption()->set_key(
        Sha256Of(absl::StrCat(i)).ToBytes());
    report.mutable_report_corruption()->set_generation(reserved.generations(i));
    session->Write(report);
  }
  ASSERT_TRUE(Eventually(
      [&] { return server_->cache().Stats().checksum_mismatches == 1; }));
  const auto again = session->Ask(AcquireOf(3, 2, 16, false)).acquire();
  EXPECT_THAT(again.outcomes(),
              ElementsAre(node::v1::OUTCOME_HIT, node::v1::OUTCOME_MISS));
  EXPECT_EQ(again.miss_reasons(1), v1::MISS_REASON_CORRUPT);
}

TEST_F(SessionTest, UseIsCounted) {
  StartDaemon();
  auto session = Open("w");
  node::v1::SessionRequest report;
  report.mutable_report_use()->set_cached_tokens(100);
  report.mutable_report_use()->set_fresh_tokens(7);
  report.mutable_report_use()->set_preemptions(2);
  report.mutable_report_use()->set_recomputed_tokens(70);
  report.mutable_report_use()->set_attention_needed_tokens(900);
  report.mutable_report_use()->set_attention_read_tokens(300);
  session->Write(report);
  session->Ask(AcquireOf(1, 1, 16, false));  // answered after the report
  EXPECT_EQ(server_->cache().Stats().request_cached_tokens, 100u);
  EXPECT_EQ(server_->cache().Stats().request_fresh_tokens, 7u);
  EXPECT_EQ(server_->cache().Stats().request_preemptions, 2u);
  EXPECT_EQ(server_->cache().Stats().request_recomputed_tokens, 70u);
  EXPECT_EQ(server_->cache().Stats().attention_needed_tokens, 900u);
  EXPECT_EQ(server_->cache().Stats().attention_read_tokens, 300u);
}

TEST_F(SessionTest, ShutdownEndsSessionsAndSaysWhy) {
  StartDaemon();
  auto session = Open("w");
  StopDaemon();
  const grpc::Status status = session->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shuts down"));
  EXPECT_NE(::access(options_.socket_path.c_str(), F_OK), 0);
  EXPECT_NE(::access((options_.socket_path + ".fd").c_str(), F_OK), 0);
}

TEST_F(SessionTest, ARestartedDaemonKnowsWhatItHad) {
  StartDaemon();
  const std::string first_id = server_->daemon_id();
  {
    auto session = Open("w");
    const auto reserved = session->Ask(AcquireOf(1, 1, 16, true)).acquire();
    session->Ask(CommitOf(2, reserved, 16));
  }
  StopDaemon();
  StartDaemon();
  EXPECT_NE(server_->daemon_id(), first_id);
  auto session = Open("w");
  const auto reply = session->Ask(AcquireOf(1, 2, 16, false)).acquire();
  EXPECT_THAT(reply.miss_reasons(), ElementsAre(v1::MISS_REASON_NOT_RESIDENT,
                                                v1::MISS_REASON_NEVER_SEEN));
}

TEST_F(SessionTest, ASecondDaemonOnTheSocketIsRefused) {
  StartDaemon();
  EXPECT_THAT(DaemonServer::Create(options_, &clock_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("another daemon")));
  // And the first still serves.
  auto session = Open("w");
  EXPECT_TRUE(session->Ask(AcquireOf(1, 1, 16, true)).has_acquire());
}

}  // namespace
}  // namespace promptcache::daemon
