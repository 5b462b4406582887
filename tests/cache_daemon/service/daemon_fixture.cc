#include "tests/cache_daemon/service/daemon_fixture.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "common/digest.h"
#include "common/page_sum.h"

namespace promptcache::daemon {

std::string TakeToken(const std::string& socket_path) {
  auto socket = ConnectUnix(socket_path + ".fd");
  if (!socket.ok()) return "";
  const UniqueFd self(
      static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const FdHello hello;
  PC_EXPECT_OK(SendWithFd(socket->get(), &hello, sizeof(hello), self.get()));
  FdWelcome welcome;
  if (!ReceiveWithFd(socket->get(), &welcome, sizeof(welcome), kPatience)
           .ok()) {
    return "";
  }
  for (uint32_t i = 0; i < welcome.num_segments; ++i) {
    FdSegment segment;
    PC_EXPECT_OK(
        ReceiveWithFd(socket->get(), &segment, sizeof(segment), kPatience));
  }
  return std::string(welcome.token.begin(), welcome.token.end());
}

RawSession::RawSession(const std::shared_ptr<grpc::Channel>& channel)
    : stub_(node::v1::NodeService::NewStub(channel)) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  stream_ = stub_->Session(&context_);
}

RawSession::~RawSession() {
  context_.TryCancel();
  if (!finished_) Finish();
}

std::optional<node::v1::Welcome> RawSession::Hello(
    const std::string& token, const std::string& worker_id) {
  node::v1::SessionRequest request;
  node::v1::Hello* hello = request.mutable_hello();
  hello->set_protocol_version(1);
  hello->set_token(token);
  hello->set_worker_id(worker_id);
  hello->set_model("test");
  const KvLayout layout = TestLayout();
  hello->mutable_layout()->set_num_layers(layout.num_layers);
  hello->mutable_layout()->set_num_kv_heads(layout.num_kv_heads);
  hello->mutable_layout()->set_head_dim(layout.head_dim);
  hello->mutable_layout()->set_page_tokens(layout.page_tokens);
  hello->mutable_layout()->set_type(static_cast<uint32_t>(layout.type));
  hello->mutable_layout()->set_version(layout.version);
  stream_->Write(request);
  node::v1::SessionResponse response;
  if (!stream_->Read(&response) || !response.has_welcome()) {
    return std::nullopt;
  }
  return response.welcome();
}

node::v1::SessionResponse RawSession::Read() {
  node::v1::SessionResponse response;
  EXPECT_TRUE(stream_->Read(&response)) << "the stream has ended";
  return response;
}

grpc::Status RawSession::Finish() {
  finished_ = true;
  node::v1::SessionResponse rest;
  while (stream_->Read(&rest)) {
  }
  return stream_->Finish();
}

node::v1::SessionRequest AcquireOf(uint64_t request_id, int num_modules,
                                   uint32_t num_tokens, bool reserve) {
  node::v1::SessionRequest request;
  node::v1::AcquireRequest* acquire = request.mutable_acquire();
  acquire->set_request_id(request_id);
  acquire->set_reserve_missing(reserve);
  acquire->set_schema("schema");
  for (int i = 0; i < num_modules; ++i) {
    acquire->mutable_keys()->append(Sha256Of(absl::StrCat(i)).ToBytes());
    acquire->add_num_tokens(num_tokens);
    acquire->add_paths(absl::StrCat(i));
  }
  return request;
}

node::v1::SessionRequest CommitOf(uint64_t request_id,
                                  const node::v1::AcquireReply& reply,
                                  uint32_t num_tokens) {
  const std::vector<std::byte> page(TestLayout().page_bytes());
  const uint64_t sum = PageSum(page);
  node::v1::SessionRequest request;
  node::v1::CommitRequest* commit = request.mutable_commit();
  commit->set_request_id(request_id);
  for (int i = 0; i < reply.reservation_ids_size(); ++i) {
    if (reply.reservation_ids(i) == 0) continue;
    commit->add_reservation_ids(reply.reservation_ids(i));
    for (uint64_t p = 0; p < TestLayout().PagesFor(num_tokens); ++p) {
      commit->add_page_sums(sum);
    }
    node::v1::ModuleMetadata* module = commit->add_modules();
    module->set_schema("schema");
    module->set_path(absl::StrCat(i));
    module->set_num_tokens(num_tokens);
  }
  return request;
}

}  // namespace promptcache::daemon
