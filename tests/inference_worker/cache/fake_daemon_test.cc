// The worker's client against daemons that are slow, wrong or malicious.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cache_daemon/service/fd_server.h"
#include "common/clock.h"
#include "common/rpc/endpoints.h"
#include "cuda/runtime/segment.h"
#include "grpcpp/grpcpp.h"
#include "inference_worker/cache/cache_client.h"
#include "promptcache/node/v1/node.grpc.pb.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr KvLayout kLayout{.num_layers = 4, .num_kv_heads = 1, .head_dim = 16};
constexpr uint32_t kStride = 16;

using Stream = grpc::ServerReaderWriter<node::v1::SessionResponse,
                                        node::v1::SessionRequest>;

// Welcomes everybody, keeps what it is sent, and says what the test says.
class FakeDaemon final : public node::v1::NodeService::Service {
 public:
  explicit FakeDaemon(const std::string& socket_path) {
    pages_ = *gpu::HostSegment::Create("pages", 1 << 16);
    generations_ = *gpu::HostSegment::Create("generations", 4096);
    auto fds = daemon::FdServer::Create(
        {.path = socket_path + ".fd"},
        {{FdKind::kSegment, 0, pages_.bytes(), pages_.fd()},
         {FdKind::kGenerations, 0, generations_.bytes(), generations_.fd()}},
        &clock_);
    PC_EXPECT_OK(fds);
    fd_server_ = *std::move(fds);
    welcome_.set_session_id(1);
    welcome_.set_page_bytes(kLayout.page_bytes());
    welcome_.set_generations_stride(kStride);
    welcome_.add_segment_ids(0);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(rpc::UnixTarget(socket_path),
                             grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeDaemon() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  grpc::Status Session(grpc::ServerContext*, Stream* stream) override {
    node::v1::SessionRequest request;
    if (!stream->Read(&request)) return grpc::Status::OK;
    node::v1::SessionResponse response;
    {
      MutexLock lock(&mu_);
      *response.mutable_welcome() = welcome_;
      stream_ = stream;
    }
    stream->Write(response);
    while (stream->Read(&request)) {
      MutexLock lock(&mu_);
      received_.push_back(request);
      changed_.SignalAll();
    }
    MutexLock lock(&mu_);
    stream_ = nullptr;
    return grpc::Status::OK;
  }

  // The next message that came.
  node::v1::SessionRequest Next() {
    const absl::Time deadline = absl::Now() + kPatience;
    MutexLock lock(&mu_);
    while (received_.empty() && absl::Now() < deadline) {
      changed_.WaitWithTimeout(&mu_, deadline - absl::Now());
    }
    if (received_.empty()) return {};
    node::v1::SessionRequest next = std::move(received_.front());
    received_.pop_front();
    return next;
  }
  void Say(const node::v1::SessionResponse& response) {
    MutexLock lock(&mu_);
    ASSERT_NE(stream_, nullptr);
    stream_->Write(response);
  }
  uint64_t* generation(uint32_t page) {
    return reinterpret_cast<uint64_t*>(generations_.base()) + page;
  }
  node::v1::Welcome& welcome() { return welcome_; }

 private:
  RealClock clock_;
  gpu::HostSegment pages_;
  gpu::HostSegment generations_;
  std::unique_ptr<daemon::FdServer> fd_server_;
  node::v1::Welcome welcome_;  // changed before anybody connects only
  std::unique_ptr<grpc::Server> server_;

  Mutex mu_;
  CondVar changed_;
  std::deque<node::v1::SessionRequest> received_ ABSL_GUARDED_BY(mu_);
  Stream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;
};

// An answer for one key of one page: page 2 of segment 0, generation 5.
node::v1::SessionResponse OnePage(uint64_t request_id,
                                  node::v1::Outcome outcome) {
  node::v1::SessionResponse response;
  node::v1::AcquireReply* reply = response.mutable_acquire();
  const bool pages =
      outcome == node::v1::OUTCOME_HIT || outcome == node::v1::OUTCOME_RESERVED;
  reply->set_request_id(request_id);
  reply->add_outcomes(outcome);
  reply->add_miss_reasons(v1::MISS_REASON_UNSPECIFIED);
  reply->add_differing_fields(0);
  reply->add_num_runs(pages ? 1 : 0);
  if (pages) {
    reply->set_lease_id(77);
    reply->add_run_segments(0);
    reply->add_run_first_pages(2);
    reply->add_run_num_pages(1);
  }
  reply->add_generations(pages ? 5 : 0);
  reply->add_reservation_ids(outcome == node::v1::OUTCOME_RESERVED ? 88 : 0);
  return response;
}

class FakeDaemonTest : public ::testing::Test {
 protected:
  std::string Path() const { return dir_.path() + "/d.sock"; }
  void Connect(absl::Duration acquire_timeout = kPatience) {
    auto client = CacheClient::Create({.socket_path = Path(),
                                       .worker_id = "w",
                                       .layout = kLayout,
                                       .acquire_timeout = acquire_timeout});
    PC_ASSERT_OK(client);
    client_ = *std::move(client);
    PC_ASSERT_OK(client_->WaitAttached(absl::Now() + kPatience));
  }
  absl::StatusOr<std::unique_ptr<CacheLease>> Acquire() {
    return client_->Acquire(
        {.keys = {{.key = Sha256Of("m"), .num_tokens = 16, .path = "m"}}});
  }
  // Acquires while the daemon answers with what `change` makes of a hit.
  absl::StatusOr<std::unique_ptr<CacheLease>> AcquireAnswered(
      const std::function<void(node::v1::AcquireReply*)>& change,
      node::v1::Outcome outcome = node::v1::OUTCOME_HIT) {
    std::thread answer([&] {
      const auto request = daemon_.Next();
      auto response = OnePage(request.acquire().request_id(), outcome);
      change(response.mutable_acquire());
      daemon_.Say(response);
    });
    auto lease = Acquire();
    answer.join();
    return lease;
  }
  void ExpectGivenBack() {
    const auto abort = daemon_.Next();
    ASSERT_TRUE(abort.has_abort()) << abort.ShortDebugString();
    EXPECT_EQ(abort.abort().reservation_ids(0), 88u);
    EXPECT_EQ(daemon_.Next().release().lease_id(), 77u);
  }

  TempDir dir_;
  FakeDaemon daemon_{Path()};
  std::unique_ptr<CacheClient> client_;
};

TEST_F(FakeDaemonTest, AnAnswerAfterTheTimeoutIsGivenBack) {
  Connect(absl::Milliseconds(50));
  EXPECT_THAT(Acquire(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                  HasSubstr("in time")));
  const uint64_t request_id = daemon_.Next().acquire().request_id();
  daemon_.Say(OnePage(request_id, node::v1::OUTCOME_RESERVED));
  ExpectGivenBack();
  EXPECT_TRUE(client_->attached());
}

TEST_F(FakeDaemonTest, AReleaseGoesWithTheNextAcquire) {
  daemon_.welcome().set_acquire_releases(true);
  Connect(absl::Milliseconds(50));
  // Whether one follows in time is the scheduler's choice: most do.
  int together = 0;
  for (int i = 0; i < 100 && together == 0; ++i) {
    PC_ASSERT_OK(AcquireAnswered([](node::v1::AcquireReply*) {}));
    EXPECT_FALSE(Acquire().ok());  // not answered
    node::v1::SessionRequest request = daemon_.Next();
    if (request.has_release()) {
      EXPECT_EQ(request.release().lease_id(), 77u);
      request = daemon_.Next();
      EXPECT_THAT(request.acquire().released_leases(), IsEmpty());
    } else {
      EXPECT_THAT(request.acquire().released_leases(), ElementsAre(77u));
      ++together;
    }
  }
  EXPECT_EQ(together, 1);
}

TEST_F(FakeDaemonTest, AReleaseThatNoAcquireFollowsIsSentAlone) {
  daemon_.welcome().set_acquire_releases(true);
  Connect();
  for (int i = 0; i < 3; ++i) {
    PC_ASSERT_OK(AcquireAnswered([](node::v1::AcquireReply*) {}));
    EXPECT_EQ(daemon_.Next().release().lease_id(), 77u);
    absl::SleepFor(absl::Milliseconds(i * 150));  // it goes to sleep meanwhile
  }
}

TEST_F(FakeDaemonTest, AReleaseLongAfterAnythingElseIsSent) {
  daemon_.welcome().set_acquire_releases(true);
  Connect();
  auto lease = AcquireAnswered([](node::v1::AcquireReply*) {});
  PC_ASSERT_OK(lease);
  absl::SleepFor(absl::Milliseconds(300));  // whoever sends releases rests
  lease->reset();
  EXPECT_EQ(daemon_.Next().release().lease_id(), 77u);
}

TEST_F(FakeDaemonTest, ThreadsThatWaitForDifferentAnswersGetTheirs) {
  Connect();
  auto pending = AcquireAnswered([](node::v1::AcquireReply*) {},
                                 node::v1::OUTCOME_PENDING);
  PC_ASSERT_OK(pending);
  for (const absl::Duration idle :
       {absl::ZeroDuration(), absl::Milliseconds(300)}) {
    std::thread waits([&] {
      EXPECT_THAT(
          (*pending)->WaitPending(0, absl::Now() + absl::Milliseconds(500)),
          StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("encoded")));
    });
    absl::SleepFor(idle);
    PC_EXPECT_OK(AcquireAnswered([](node::v1::AcquireReply*) {}));
    waits.join();
    EXPECT_EQ(daemon_.Next().release().lease_id(), 77u);
  }
  std::thread answers([&] {
    EXPECT_TRUE(daemon_.Next().has_acquire());
    node::v1::SessionResponse push;
    push.mutable_pending_resolved()->set_request_id(1);
    *push.mutable_pending_resolved()->mutable_reply() =
        OnePage(1, node::v1::OUTCOME_HIT).acquire();
    daemon_.Say(push);
    daemon_.Say(OnePage(4, node::v1::OUTCOME_HIT));
  });
  std::thread waits([&] {
    PC_EXPECT_OK((*pending)->WaitPending(0, absl::Now() + kPatience));
  });
  PC_EXPECT_OK(Acquire());
  answers.join();
  waits.join();
}

TEST_F(FakeDaemonTest, ADaemonThatReadsNoReleasesInAcquiresGetsThemAlone) {
  Connect(absl::Milliseconds(50));
  PC_ASSERT_OK(AcquireAnswered([](node::v1::AcquireReply*) {}));
  EXPECT_FALSE(Acquire().ok());
  bool released = false;
  for (int i = 0; i < 2; ++i) {  // in either order
    const node::v1::SessionRequest request = daemon_.Next();
    released = released || request.release().lease_id() == 77u;
    EXPECT_THAT(request.acquire().released_leases(), IsEmpty());
  }
  EXPECT_TRUE(released);
}

TEST_F(FakeDaemonTest, PathsAreJoinedForADaemonThatReadsThem) {
  for (const bool reads : {false, true}) {
    daemon_.welcome().set_joined_paths(reads);
    Connect(absl::Milliseconds(20));
    EXPECT_FALSE(client_
                     ->Acquire({.keys = {{.num_tokens = 16, .path = "one"},
                                         {.num_tokens = 16, .path = ""},
                                         {.num_tokens = 16, .path = "2"}}})
                     .ok());
    const node::v1::AcquireRequest request = daemon_.Next().acquire();
    if (reads) {
      EXPECT_EQ(request.joined_paths(), "one2");
      EXPECT_THAT(request.path_bytes(), ElementsAre(3, 0, 1));
      EXPECT_THAT(request.paths(), IsEmpty());
    } else {
      EXPECT_THAT(request.paths(), ElementsAre("one", "", "2"));
      EXPECT_THAT(request.path_bytes(), IsEmpty());
    }
    client_.reset();
  }
}

TEST_F(FakeDaemonTest, AReservationForALeaseThatIsGoneIsGivenBack) {
  Connect();
  auto lease = AcquireAnswered([](node::v1::AcquireReply*) {},
                               node::v1::OUTCOME_PENDING);
  PC_ASSERT_OK(lease);
  lease->reset();
  node::v1::SessionResponse push;
  push.mutable_pending_resolved()->set_request_id(1);
  *push.mutable_pending_resolved()->mutable_reply() =
      OnePage(1, node::v1::OUTCOME_RESERVED).acquire();
  daemon_.Say(push);
  ExpectGivenBack();
}

TEST_F(FakeDaemonTest, AChangedGenerationMakesALeaseInvalid) {
  *daemon_.generation(2) = 5;
  Connect();
  const auto lease = AcquireAnswered([](node::v1::AcquireReply*) {});
  PC_ASSERT_OK(lease);
  EXPECT_TRUE((*lease)->Valid(0));
  *daemon_.generation(3) = 9;  // another page's
  EXPECT_TRUE((*lease)->Valid(0));
  *daemon_.generation(2) = 6;
  EXPECT_FALSE((*lease)->Valid(0));
  EXPECT_FALSE((*lease)->Valid(1));  // there is no such module
}

TEST_F(FakeDaemonTest, AnswersThatMakeNoSenseEndTheSessionAndNothingElse) {
  const std::vector<std::function<void(node::v1::AcquireReply*)>> changes = {
      [](auto* r) { r->set_run_segments(0, 1); },
      [](auto* r) { r->set_run_first_pages(0, kStride); },
      [](auto* r) { r->set_run_first_pages(0, UINT32_MAX); },
      [](auto* r) { r->set_run_num_pages(0, 2); },
      [](auto* r) { r->set_run_num_pages(0, 0); },
      [](auto* r) { r->set_num_runs(0, 2); },
      [](auto* r) { r->set_outcomes(0, node::v1::OUTCOME_MISS); },
      [](auto* r) { r->set_outcomes(0, node::v1::OUTCOME_UNSPECIFIED); },
      [](auto* r) { r->clear_generations(); },
      [](auto* r) { r->add_outcomes(node::v1::OUTCOME_HIT); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    Connect();
    EXPECT_FALSE(AcquireAnswered(changes[i]).ok()) << "change " << i;
    EXPECT_FALSE(client_->attached());
    client_.reset();
  }
}

TEST_F(FakeDaemonTest, AWelcomeForOtherPagesIsRefused) {
  daemon_.welcome().set_page_bytes(kLayout.page_bytes() * 2);
  auto client = CacheClient::Create(
      {.socket_path = Path(), .worker_id = "w", .layout = kLayout});
  PC_ASSERT_OK(client);
  EXPECT_THAT((*client)->WaitAttached(absl::Now() + absl::Milliseconds(500)),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("pages have 8192 bytes, ours 4096")));
}

}  // namespace
}  // namespace promptcache::worker
