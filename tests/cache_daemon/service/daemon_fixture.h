#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache_daemon/service/daemon_server.h"
#include "common/clock.h"
#include "common/fd_socket.h"
#include "common/kv_layout.h"
#include "common/rpc/endpoints.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/node/v1/node.grpc.pb.h"
#include "promptcache/v1/cache.grpc.pb.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::daemon {

// No test waits longer for anything, and none waits in vain.
inline constexpr absl::Duration kPatience = absl::Seconds(20);

// Pages of 4 KiB, 16 tokens each.
inline KvLayout TestLayout() {
  return {.num_layers = 4, .num_kv_heads = 1, .head_dim = 16};
}

// A real daemon in this process, on real sockets in a folder of its own.
class DaemonFixture : public ::testing::Test {
 protected:
  DaemonFixture() {
    options_.socket_path = dir_.path() + "/run/d.sock";
    options_.listen = "127.0.0.1:0";
    options_.pool = {.device_bytes = 2 << 20, .segment_bytes = 1 << 20};
    options_.registry.path = dir_.path() + "/registry.db";
  }
  void StartDaemon() {
    auto server = DaemonServer::Create(options_, &clock_);
    PC_ASSERT_OK(server);
    server_ = *std::move(server);
  }
  void StopDaemon() { server_.reset(); }
  // Everything that the core promises holds after every test.
  void TearDown() override {
    if (server_ == nullptr) return;
    PC_EXPECT_OK(server_->cache().CheckInvariants());
  }

  std::shared_ptr<grpc::Channel> NodeChannel() const {
    grpc::ChannelArguments args;
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(rpc::UnixTarget(options_.socket_path),
                                     grpc::InsecureChannelCredentials(), args);
  }
  std::shared_ptr<grpc::Channel> TcpChannel() const {
    return grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", server_->listen_port()),
        grpc::InsecureChannelCredentials());
  }
  static void SetDeadline(grpc::ClientContext* context) {
    context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  }
  // The device tier, from the core itself.
  TierStats Device() const { return server_->cache().Stats().tiers.at(0); }
  // Waits for what happens on the daemon's own threads.
  template <typename Condition>
  static bool Eventually(const Condition& condition) {
    const absl::Time deadline = absl::Now() + kPatience;
    while (!condition()) {
      if (absl::Now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  TempDir dir_;
  RealClock clock_;
  DaemonServer::Options options_;
  std::unique_ptr<DaemonServer> server_;
};

// A token of the daemon's descriptor socket; "" when it gives none.
std::string TakeToken(const std::string& socket_path);

// One raw session: what a worker sends and gets, message by message.
class RawSession {
 public:
  explicit RawSession(const std::shared_ptr<grpc::Channel>& channel);
  ~RawSession();

  bool Write(const node::v1::SessionRequest& request) {
    return stream_->Write(request);
  }
  // Says hello; the welcome, or nothing when it was refused.
  std::optional<node::v1::Welcome> Hello(const std::string& token,
                                         const std::string& worker_id);
  // The next message; fails the test when there is none.
  node::v1::SessionResponse Read();
  node::v1::SessionResponse Ask(const node::v1::SessionRequest& request) {
    EXPECT_TRUE(Write(request));
    return Read();
  }
  void Cancel() { context_.TryCancel(); }
  void HalfClose() { stream_->WritesDone(); }
  // The stream's status, after what is left of it was read.
  grpc::Status Finish();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<node::v1::NodeService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<node::v1::SessionRequest,
                                           node::v1::SessionResponse>>
      stream_;
  bool finished_ = false;
};

// An Acquire of modules "0", "1", …, of `num_tokens` tokens each.
node::v1::SessionRequest AcquireOf(uint64_t request_id, int num_modules,
                                   uint32_t num_tokens, bool reserve);
// Commits everything that `reply` reserved, as pages of zeros.
node::v1::SessionRequest CommitOf(uint64_t request_id,
                                  const node::v1::AcquireReply& reply,
                                  uint32_t num_tokens);

}  // namespace promptcache::daemon
