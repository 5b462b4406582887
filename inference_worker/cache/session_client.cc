#include "inference_worker/cache/session_client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cache/proto_convert.h"

namespace promptcache::worker {
namespace {

// How often the thread in Attend looks, which is how long a release waits for
// an Acquire that takes it along; and after how many times in vain it rests.
constexpr absl::Duration kTick = absl::Milliseconds(2);
constexpr int kIdleTicks = 50;

}  // namespace

absl::StatusOr<std::shared_ptr<SessionClient>> SessionClient::Open(
    const Options& options) {
  PC_ASSIGN_OR_RETURN(
      ImportedMemory memory,
      ImportedMemory::Receive(options.socket_path + ".fd", options.device,
                              options.attach_timeout));
  std::shared_ptr<SessionClient> session(
      new SessionClient(options, std::move(memory)));
  session->stream_.Start(session->Hello());
  absl::Status greeted = session->Greet();
  if (!greeted.ok()) {
    session->Break(greeted);
    session->Close();
    return greeted;
  }
  return session;
}

SessionClient::SessionClient(const Options& options, ImportedMemory memory)
    : options_(options),
      memory_(std::move(memory)),
      stream_(options.socket_path, this) {}

node::v1::SessionRequest SessionClient::Hello() const {
  node::v1::SessionRequest request;
  node::v1::Hello* hello = request.mutable_hello();
  hello->set_protocol_version(1);
  hello->set_token(memory_.token());
  hello->set_worker_id(options_.worker_id);
  hello->set_model(options_.model);
  *hello->mutable_layout() = ToProto(options_.layout);
  const gpu::DeviceInfo& device = memory_.device().info();
  hello->set_device_uuid(device.uuid);
  hello->set_driver_version(device.driver_version);
  hello->set_reads_arriving(options_.reads_arriving);
  for (const gpu::HandleKind kind :
       {gpu::HandleKind::kMemfd, gpu::HandleKind::kCudaIpc,
        gpu::HandleKind::kCudaFd}) {
    if (memory_.device().CanImport(kind)) {
      hello->add_importable_kinds(static_cast<node::v1::HandleKind>(kind));
    }
  }
  return request;
}

absl::Status SessionClient::Greet() {
  const absl::Time deadline = absl::Now() + options_.attach_timeout;
  {
    MutexLock lock(stream_.mu());
    CondVar wake;
    stream_.WaitUntil(
        [this] {
          stream_.mu()->AssertHeld();
          return greeting_.has_value() || lost();
        },
        deadline, &wake);
    if (lost()) {
      // The daemon's reason comes with the stream's status.
      stream_.WaitUntil(
          [this] {
            stream_.mu()->AssertHeld();
            return stream_.finished();
          },
          deadline, &wake);
      return stream_.loss();
    }
    if (!greeting_.has_value()) {
      return absl::DeadlineExceededError(
          absl::StrCat("no welcome from ", options_.socket_path, " within ",
                       absl::FormatDuration(options_.attach_timeout)));
    }
    welcome_ = *greeting_;
  }
  if (welcome_.page_bytes() != options_.layout.page_bytes()) {
    return absl::InternalError(
        absl::StrCat("the daemon's pages have ", welcome_.page_bytes(),
                     " bytes, ours ", options_.layout.page_bytes()));
  }
  PC_RETURN_IF_ERROR(memory_.Import(SegmentsFromProto(welcome_)));
  return memory_.Configure(welcome_.page_bytes(), welcome_.generations_stride(),
                           {.begin = welcome_.progress_words_begin(),
                            .count = welcome_.num_progress_words()});
}

absl::Status SessionClient::loss() const {
  MutexLock lock(stream_.mu());
  return stream_.loss();
}

void SessionClient::Attend() {
  MutexLock lock(stream_.mu());
  int idle_ticks = 0;
  while (!lost()) {
    if (idle_ticks < kIdleTicks) {
      Tick();
      idle_ticks = std::exchange(used_, false) ? 0 : idle_ticks + 1;
    } else {
      Rest();
      idle_ticks = 0;
    }
    TellSchemaChanges();
  }
}

void SessionClient::Tick() {
  attended_.WaitWithTimeout(stream_.mu(), kTick);
  if (lost()) return;
  stream_.TakeWhatCame();
  EnqueueReleases();
  stream_.WriteNext();
}

void SessionClient::Rest() {
  resting_ = true;
  stream_.WaitUntil(
      [this] {
        stream_.mu()->AssertHeld();
        return lost() || used_ || !schema_changes_.empty();
      },
      absl::InfiniteFuture(), &attended_);
  resting_ = false;
}

void SessionClient::TellSchemaChanges() {
  if (schema_changes_.empty()) return;
  const auto changes = std::exchange(schema_changes_, {});
  stream_.mu()->Unlock();
  for (const node::v1::SchemaChanged& change : changes) {
    options_.on_schema_changed(change.name(), change.revision());
  }
  stream_.mu()->Lock();
}

void SessionClient::Release(uint64_t lease_id) {
  MutexLock lock(stream_.mu());
  if (lost()) return;
  if (!resting_) {
    releases_.push_back(lease_id);
    used_ = true;
    return;
  }
  // Nobody would send it soon.
  node::v1::SessionRequest request;
  request.mutable_release()->set_lease_id(lease_id);
  stream_.Enqueue(std::move(request));
  stream_.WriteNext();
}

void SessionClient::EnqueueReleases() {
  for (const uint64_t lease_id : std::exchange(releases_, {})) {
    node::v1::SessionRequest request;
    request.mutable_release()->set_lease_id(lease_id);
    stream_.Enqueue(std::move(request));
  }
}

absl::StatusOr<node::v1::SessionResponse> SessionClient::Call(
    uint64_t request_id, node::v1::SessionRequest request,
    absl::Time deadline) {
  PendingCall call;
  MutexLock lock(stream_.mu());
  if (lost()) return stream_.loss();
  calls_[request_id] = &call;
  used_ = true;
  stream_.Enqueue(std::move(request));
  stream_.WriteNext();
  stream_.WaitUntil([&call] { return call.result.has_value(); }, deadline,
                    &call.done);
  calls_.erase(request_id);
  if (call.result.has_value()) return *std::move(call.result);
  return absl::DeadlineExceededError(
      "the cache daemon has not answered in time");
}

absl::StatusOr<node::v1::SessionResponse> SessionClient::CallAcquire(
    node::v1::SessionRequest request, absl::Time deadline) {
  if (welcome_.acquire_releases()) {
    MutexLock lock(stream_.mu());
    for (const uint64_t lease_id : std::exchange(releases_, {})) {
      request.mutable_acquire()->add_released_leases(lease_id);
    }
  }
  const uint64_t request_id = request.acquire().request_id();
  return Call(request_id, std::move(request), deadline);
}

void SessionClient::Send(node::v1::SessionRequest request) {
  MutexLock lock(stream_.mu());
  if (lost()) return;
  stream_.Enqueue(std::move(request));
  stream_.WriteNext();
}

void SessionClient::GiveBack(const node::v1::AcquireReply& reply) {
  node::v1::SessionRequest abort;
  for (const uint64_t id : reply.reservation_ids()) {
    if (id != 0) abort.mutable_abort()->add_reservation_ids(id);
  }
  if (abort.has_abort()) Send(std::move(abort));
  if (reply.lease_id() != 0) Release(reply.lease_id());
}

void SessionClient::Watch(uint64_t request_id) {
  MutexLock lock(stream_.mu());
  watched_[request_id];
}

void SessionClient::Unwatch(uint64_t request_id) {
  std::map<uint32_t, node::v1::AcquireReply> untaken;
  {
    MutexLock lock(stream_.mu());
    const auto watched = watched_.find(request_id);
    if (watched == watched_.end()) return;
    untaken = std::move(watched->second.resolved);
    watched_.erase(watched);
  }
  for (const auto& [index, reply] : untaken) GiveBack(reply);
}

absl::StatusOr<node::v1::AcquireReply> SessionClient::WaitResolved(
    uint64_t request_id, uint32_t index, absl::Time deadline) {
  MutexLock lock(stream_.mu());
  const auto found = watched_.find(request_id);
  if (found == watched_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("request ", request_id, " is not waited for"));
  }
  Watched& watched = found->second;
  stream_.WaitUntil([&] { return watched.resolved.contains(index) || lost(); },
                    deadline, &watched.changed);
  const auto resolved = watched.resolved.find(index);
  if (resolved != watched.resolved.end()) {
    node::v1::AcquireReply reply = std::move(resolved->second);
    watched.resolved.erase(resolved);
    return reply;
  }
  if (lost()) return stream_.loss();
  return absl::DeadlineExceededError(
      absl::StrCat("module ", index, " is still being encoded elsewhere"));
}

void SessionClient::Break(const absl::Status& why) { stream_.Break(why); }

void SessionClient::Close() {
  {
    MutexLock lock(stream_.mu());
    closing_ = true;
    unused_.SignalAll();
    if (!lost()) EnqueueReleases();
  }
  stream_.Close();
}

bool SessionClient::AddUser() {
  MutexLock lock(stream_.mu());
  if (lost()) return false;
  ++num_users_;
  return true;
}

void SessionClient::RemoveUser() {
  MutexLock lock(stream_.mu());
  if (--num_users_ == 0) unused_.SignalAll();
}

bool SessionClient::WaitUnused(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(stream_.mu());
  while (num_users_ > 0 && !closing_ && absl::Now() < deadline) {
    unused_.WaitWithTimeout(stream_.mu(), deadline - absl::Now());
  }
  return num_users_ == 0;
}

void SessionClient::OnLost() {
  for (auto& [id, call] : calls_) {
    if (!call->result.has_value()) call->result = stream_.loss();
  }
  releases_.clear();
  attended_.SignalAll();
}

void SessionClient::OnMessage(node::v1::SessionResponse* response) {
  using Message = node::v1::SessionResponse::MessageCase;
  switch (response->message_case()) {
    case Message::kWelcome: {
      MutexLock lock(stream_.mu());
      greeting_ = response->welcome();
      stream_.WakeAll();
      return;
    }
    case Message::kAcquire: {
      const uint64_t request_id = response->acquire().request_id();
      FinishCall(request_id, std::move(*response));
      return;
    }
    case Message::kCommit: {
      const uint64_t request_id = response->commit().request_id();
      FinishCall(request_id, std::move(*response));
      return;
    }
    case Message::kSetPolicy: {
      const uint64_t request_id = response->set_policy().request_id();
      FinishCall(request_id, std::move(*response));
      return;
    }
    case Message::kRequestFailed: {
      const node::v1::RequestFailed& failed = response->request_failed();
      const grpc::Status status(static_cast<grpc::StatusCode>(failed.code()),
                                failed.message());
      FinishCall(failed.request_id(), rpc::FromGrpcStatus(status));
      return;
    }
    case Message::kPendingResolved:
      Resolve(response->mutable_pending_resolved());
      return;
    case Message::kSchemaChanged:
      if (options_.on_schema_changed) {
        MutexLock lock(stream_.mu());
        schema_changes_.push_back(
            std::move(*response->mutable_schema_changed()));
        attended_.Signal();
      }
      return;
    case Message::MESSAGE_NOT_SET:  // a newer daemon's message
      return;
  }
}

void SessionClient::FinishCall(
    uint64_t request_id, absl::StatusOr<node::v1::SessionResponse> result) {
  {
    MutexLock lock(stream_.mu());
    const auto call = calls_.find(request_id);
    if (call != calls_.end()) {
      call->second->result = std::move(result);
      call->second->done.Signal();
      return;
    }
  }
  // Its caller has given up: what the reply grants would be held for ever.
  if (result.ok() && result->has_acquire()) GiveBack(result->acquire());
  if (!result.ok() && request_id == 0) {
    LOG(WARNING) << "the cache daemon refused a message: " << result.status();
  }
}

void SessionClient::Resolve(node::v1::PendingResolved* resolved) {
  {
    MutexLock lock(stream_.mu());
    const auto watched = watched_.find(resolved->request_id());
    if (watched != watched_.end()) {
      watched->second.resolved[resolved->index()] =
          std::move(*resolved->mutable_reply());
      watched->second.changed.SignalAll();
      return;
    }
  }
  GiveBack(resolved->reply());
}

}  // namespace promptcache::worker
