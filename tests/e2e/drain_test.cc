// How the servers end on SIGTERM, as an orchestrator and clients see it.

#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <filesystem>

#include "common/rpc/grpc_status.h"
#include "promptcache/v1/inference.grpc.pb.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(90);
// grpc.health.v1.HealthCheckResponse.ServingStatus.
constexpr uint64_t kServing = 1;
constexpr uint64_t kNotServing = 2;
constexpr uint64_t kEnded = 0;  // no message came

std::shared_ptr<grpc::Channel> NewConnection(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   args);
}

// What grpc.health.v1 says of the whole server over a connection of its own:
// Watch tells every change, Check answers once.
class HealthCall {
 public:
  HealthCall(const std::string& address, const std::string& method)
      : stub_(NewConnection(address)) {
    // Longer than anybody waits for a server to end.
    context_.set_deadline(absl::ToChronoTime(absl::Now() + 3 * kPatience));
    call_ = stub_.PrepareCall(&context_, "/grpc.health.v1.Health/" + method,
                              &queue_);
    call_->StartCall(nullptr);
    if (!Done()) return;
    const grpc::Slice all_services("");
    call_->WriteLast(grpc::ByteBuffer(&all_services, 1), {}, nullptr);
    Done();
  }
  ~HealthCall() {
    context_.TryCancel();
    grpc::Status ignored;
    call_->Finish(&ignored, nullptr);
    Done();
  }
  // The next message's status; kEnded when the server has ended the call.
  uint64_t Next() {
    grpc::ByteBuffer response;
    call_->Read(&response, nullptr);
    grpc::Slice bytes;
    if (!Done() || !response.DumpToSingleSlice(&bytes).ok()) return kEnded;
    google::protobuf::UnknownFieldSet message;
    const auto* data = reinterpret_cast<const char*>(bytes.begin());
    if (!message.ParseFromString(std::string(data, bytes.size()))) {
      return kEnded;
    }
    return message.empty() ? kEnded : message.field(0).varint();
  }

 private:
  bool Done() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

// A request whose reader reads when told to: once what may be under way is
// full, the worker waits for it.
class HeldRequest {
 public:
  HeldRequest(const std::string& address, uint32_t max_tokens)
      : stub_(v1::InferenceService::NewStub(NewConnection(address))) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + 2 * kPatience));
    v1::GenerateRequest request;
    request.mutable_prompt()->set_text("Once upon a time");
    request.set_max_tokens(max_tokens);
    request.set_ignore_eos(true);
    request.set_top_logprobs(4);
    reader_ = stub_->Generate(&context_, request);
  }
  // Returns when the first token is there.
  bool Begin() {
    while (num_tokens_ == 0 && Read()) {
    }
    return num_tokens_ > 0;
  }
  absl::Status ReadAll() {
    while (Read()) {
    }
    return rpc::FromGrpcStatus(reader_->Finish());
  }
  uint32_t num_tokens() const { return num_tokens_; }

 private:
  bool Read() {
    v1::GenerateResponse event;
    if (!reader_->Read(&event)) return false;
    num_tokens_ += static_cast<uint32_t>(event.delta().tokens_size());
    return true;
  }
  std::unique_ptr<v1::InferenceService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  uint32_t num_tokens_ = 0;
};

class DrainTest : public NodeTest {
 protected:
  // Room for answers that are longer than what gRPC buffers.
  DrainTest() { UseTinyModel({.context = 16384}); }
};

TEST_F(DrainTest, AWorkerFinishesWhatRunsAndTakesNothingNew) {
  auto worker = StartWorker({"--daemon_socket=", "--drain_timeout=10m"});
  // Open until the end, and after the requests: it must not hold up anything.
  HealthCall watch(worker->address(), "Watch");
  ASSERT_EQ(watch.Next(), kServing);
  HeldRequest running(worker->address(), 5000);
  ASSERT_TRUE(running.Begin());
  PC_ASSERT_OK(worker->process().Signal(SIGTERM));
  EXPECT_EQ(watch.Next(), kNotServing);
  EXPECT_EQ(HealthCall(worker->address(), "Check").Next(), kNotServing);
  EXPECT_THAT(worker->Generate(Request("<prompt schema=\"s\"/>")).status,
              StatusIs(absl::StatusCode::kUnavailable,
                       ::testing::HasSubstr("shutting down")));
  EXPECT_THAT(worker->ListSchemas().status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       ::testing::HasSubstr("shutting down")));
  EXPECT_TRUE(worker->process().Running());
  PC_EXPECT_OK(running.ReadAll());
  EXPECT_EQ(running.num_tokens(), 5000u);
  EXPECT_THAT(worker->process().Wait(kPatience), IsOkAndHolds("exit status 0"));
  EXPECT_EQ(watch.Next(), kEnded);
}

TEST_F(DrainTest, ARequestThatTakesTooLongIsCancelled) {
  auto worker = StartWorker({"--daemon_socket=", "--drain_timeout=100ms"});
  HeldRequest running(worker->address(), 15000);
  ASSERT_TRUE(running.Begin());
  PC_ASSERT_OK(worker->process().Signal(SIGTERM));
  EXPECT_THAT(worker->process().Wait(kPatience), IsOkAndHolds("exit status 0"));
  EXPECT_FALSE(running.ReadAll().ok());
  EXPECT_LT(running.num_tokens(), 15000u);
  EXPECT_THAT(worker->process().Log(),
              ::testing::HasSubstr("ran too long were cancelled"));
}

TEST_F(DrainTest, TheDaemonEndsUnderItsWorkers) {
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  HealthCall watch(daemon_address(), "Watch");
  ASSERT_EQ(watch.Next(), kServing);
  HeldRequest running(worker->address(), 5000);
  ASSERT_TRUE(running.Begin());
  PC_ASSERT_OK(daemon().Signal(SIGTERM));
  EXPECT_EQ(watch.Next(), kNotServing);
  EXPECT_THAT(daemon().Wait(kPatience), IsOkAndHolds("exit status 0"));
  EXPECT_FALSE(std::filesystem::exists(dir() + "/daemon.sock"));
  EXPECT_FALSE(std::filesystem::exists(dir() + "/daemon.sock.fd"));
  PC_EXPECT_OK(running.ReadAll());
  EXPECT_EQ(running.num_tokens(), 5000u);
}

}  // namespace
}  // namespace promptcache::e2e
