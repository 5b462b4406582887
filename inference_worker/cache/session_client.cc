#include "inference_worker/cache/session_client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/endpoints.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::worker {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
// A daemon that reads nothing: beyond this the session is given up.
constexpr size_t kMaxQueuedWrites = 16384;
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);
// How often the thread in Attend looks, which is how long a release waits for
// an Acquire that takes it along; and after how many times in vain it rests.
constexpr absl::Duration kTick = absl::Milliseconds(2);
constexpr int kIdleTicks = 50;

gpr_timespec ToGpr(absl::Time time) {
  if (time == absl::InfiniteFuture()) {
    return gpr_inf_future(GPR_CLOCK_REALTIME);
  }
  const timespec ts = absl::ToTimespec(time);
  return {.tv_sec = ts.tv_sec,
          .tv_nsec = static_cast<int32_t>(ts.tv_nsec),
          .clock_type = GPR_CLOCK_REALTIME};
}

std::shared_ptr<grpc::Channel> NewChannel(const std::string& socket_path) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  args.SetMaxSendMessageSize(kMaxMessageBytes);
  // A channel per attempt, sharing nothing: the back-off is the client's.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  for (const auto& [name, value] : rpc::kUnixSocketArgs) {
    args.SetInt(name, value);
  }
  return grpc::CreateCustomChannel(rpc::UnixTarget(socket_path),
                                   grpc::InsecureChannelCredentials(), args);
}

// An older daemon says nothing of kinds: then all came by descriptor.
std::vector<ImportedMemory::Told> ToldSegments(
    const node::v1::Welcome& welcome) {
  std::vector<ImportedMemory::Told> segments;
  size_t next_handle = 0;
  for (int i = 0; i < welcome.segment_ids_size(); ++i) {
    ImportedMemory::Told& told = segments.emplace_back();
    told.segment = welcome.segment_ids(i);
    if (i < welcome.segment_kinds_size()) {
      told.kind = static_cast<gpu::HandleKind>(welcome.segment_kinds(i));
    }
    if (i < welcome.segment_bytes_size()) {
      told.num_bytes = welcome.segment_bytes(i);
    }
    if (told.kind == gpu::HandleKind::kCudaIpc) {
      told.ipc_handle = welcome.ipc_handles().substr(
          std::min(next_handle, welcome.ipc_handles().size()),
          gpu::kIpcHandleBytes);
      next_handle += gpu::kIpcHandleBytes;
    }
  }
  return segments;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SessionClient>> SessionClient::Open(
    const Options& options) {
  PC_ASSIGN_OR_RETURN(
      ImportedMemory memory,
      ImportedMemory::Receive(options.socket_path + ".fd", options.device,
                              options.attach_timeout));
  std::shared_ptr<SessionClient> session(
      new SessionClient(options, std::move(memory)));
  session->Start();
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
      stub_(node::v1::NodeService::NewStub(NewChannel(options.socket_path))),
      context_(std::make_unique<grpc::ClientContext>()) {}

void SessionClient::Start() {
  node::v1::SessionRequest request;
  node::v1::Hello* hello = request.mutable_hello();
  hello->set_protocol_version(1);
  hello->set_token(memory_.token());
  hello->set_worker_id(options_.worker_id);
  hello->set_model(options_.model);
  node::v1::KvLayout* layout = hello->mutable_layout();
  layout->set_num_layers(options_.layout.num_layers);
  layout->set_num_kv_heads(options_.layout.num_kv_heads);
  layout->set_head_dim(options_.layout.head_dim);
  layout->set_page_tokens(options_.layout.page_tokens);
  layout->set_type(static_cast<uint32_t>(options_.layout.type));
  layout->set_version(options_.layout.version);
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

  MutexLock lock(&mu_);
  Enqueue(std::move(request));
  stream_ = stub_->AsyncSession(context_.get(), &events_, Tag(Op::kStart));
}

absl::Status SessionClient::Greet() {
  const absl::Time deadline = absl::Now() + options_.attach_timeout;
  {
    MutexLock lock(&mu_);
    CondVar wake;
    WaitUntil(
        [this] {
          mu_.AssertHeld();
          return greeting_.has_value() || lost_;
        },
        deadline, &wake);
    if (lost_) {
      // The daemon's reason comes with the stream's status.
      WaitUntil(
          [this] {
            mu_.AssertHeld();
            return finished_;
          },
          deadline, &wake);
      return loss_;
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
  PC_RETURN_IF_ERROR(memory_.Import(ToldSegments(welcome_)));
  return memory_.Configure(welcome_.page_bytes(), welcome_.generations_stride(),
                           {.begin = welcome_.progress_words_begin(),
                            .count = welcome_.num_progress_words()});
}

absl::Status SessionClient::loss() const {
  MutexLock lock(&mu_);
  return loss_;
}

void SessionClient::Attend() {
  MutexLock lock(&mu_);
  int idle_ticks = 0;
  while (!lost_) {
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
  attended_.WaitWithTimeout(&mu_, kTick);
  if (lost_) return;
  // Who asks all the time takes all there is.
  while (!took_event_ && !taking_events_ && TakeEvent(absl::UnixEpoch())) {
    took_event_ = false;
  }
  took_event_ = false;
  PassTurnOn();
  EnqueueReleases();
  WriteNext();
}

void SessionClient::Rest() {
  resting_ = true;
  WaitUntil(
      [this] {
        mu_.AssertHeld();
        return lost_ || used_ || !schema_changes_.empty();
      },
      absl::InfiniteFuture(), &attended_);
  resting_ = false;
}

void SessionClient::TellSchemaChanges() {
  if (schema_changes_.empty()) return;
  const auto changes = std::exchange(schema_changes_, {});
  mu_.Unlock();
  for (const node::v1::SchemaChanged& change : changes) {
    options_.on_schema_changed(change.name(), change.revision());
  }
  mu_.Lock();
}

void SessionClient::Release(uint64_t lease_id) {
  MutexLock lock(&mu_);
  if (lost_) return;
  if (!resting_) {
    releases_.push_back(lease_id);
    used_ = true;
    return;
  }
  // Nobody would send it soon.
  node::v1::SessionRequest request;
  request.mutable_release()->set_lease_id(lease_id);
  Enqueue(std::move(request));
  WriteNext();
}

void SessionClient::EnqueueReleases() {
  for (const uint64_t lease_id : std::exchange(releases_, {})) {
    node::v1::SessionRequest request;
    request.mutable_release()->set_lease_id(lease_id);
    Enqueue(std::move(request));
  }
}

absl::StatusOr<node::v1::SessionResponse> SessionClient::Call(
    uint64_t request_id, node::v1::SessionRequest request,
    absl::Time deadline) {
  PendingCall call;
  MutexLock lock(&mu_);
  if (lost_) return loss_;
  calls_[request_id] = &call;
  used_ = true;
  Enqueue(std::move(request));
  WriteNext();
  WaitUntil([&call] { return call.result.has_value(); }, deadline, &call.done);
  calls_.erase(request_id);
  if (call.result.has_value()) return *std::move(call.result);
  return absl::DeadlineExceededError(
      "the cache daemon has not answered in time");
}

absl::StatusOr<node::v1::SessionResponse> SessionClient::CallAcquire(
    node::v1::SessionRequest request, absl::Time deadline) {
  if (welcome_.acquire_releases()) {
    MutexLock lock(&mu_);
    for (const uint64_t lease_id : std::exchange(releases_, {})) {
      request.mutable_acquire()->add_released_leases(lease_id);
    }
  }
  const uint64_t request_id = request.acquire().request_id();
  return Call(request_id, std::move(request), deadline);
}

void SessionClient::Send(node::v1::SessionRequest request) {
  MutexLock lock(&mu_);
  if (lost_) return;
  Enqueue(std::move(request));
  WriteNext();
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
  MutexLock lock(&mu_);
  watched_[request_id];
}

void SessionClient::Unwatch(uint64_t request_id) {
  std::map<uint32_t, node::v1::AcquireReply> untaken;
  {
    MutexLock lock(&mu_);
    const auto watched = watched_.find(request_id);
    if (watched == watched_.end()) return;
    untaken = std::move(watched->second.resolved);
    watched_.erase(watched);
  }
  for (const auto& [index, reply] : untaken) GiveBack(reply);
}

absl::StatusOr<node::v1::AcquireReply> SessionClient::WaitResolved(
    uint64_t request_id, uint32_t index, absl::Time deadline) {
  MutexLock lock(&mu_);
  const auto found = watched_.find(request_id);
  if (found == watched_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("request ", request_id, " is not waited for"));
  }
  Watched& watched = found->second;
  WaitUntil([&] { return watched.resolved.contains(index) || lost(); },
            deadline, &watched.changed);
  const auto resolved = watched.resolved.find(index);
  if (resolved != watched.resolved.end()) {
    node::v1::AcquireReply reply = std::move(resolved->second);
    watched.resolved.erase(resolved);
    return reply;
  }
  if (lost_) return loss_;
  return absl::DeadlineExceededError(
      absl::StrCat("module ", index, " is still being encoded elsewhere"));
}

void SessionClient::Break(const absl::Status& why) {
  MutexLock lock(&mu_);
  Lose(why);
  Cancel();
}

void SessionClient::Close() {
  const absl::Time deadline = absl::Now() + kCloseTimeout;
  // Destroyed after the lock, the channel last.
  std::unique_ptr<node::v1::NodeService::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context;
  {
    MutexLock lock(&mu_);
    closing_ = true;
    changed_.SignalAll();
    if (!lost_) EnqueueReleases();
    WriteNext();
    const auto ended = [this] {
      mu_.AssertHeld();
      return Ended();
    };
    CondVar wake;
    WaitUntil(ended, deadline, &wake);
    if (!Ended()) {
      Lose(absl::CancelledError("closed"));
      // gRPC comes to its end without the daemon's help.
      Cancel();
      WaitUntil(ended, absl::InfiniteFuture(), &wake);
    }
    while (num_starting_writes_ > 0) changed_.Wait(&mu_);
    if (std::exchange(closed_, true)) return;
    stream_.reset();  // lies in the call, which the context holds
    context = std::move(context_);
    stub = std::move(stub_);
  }
  events_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (events_.Next(&tag, &ok)) {
  }
}

bool SessionClient::AddUser() {
  MutexLock lock(&mu_);
  if (lost_) return false;
  ++num_users_;
  return true;
}

void SessionClient::RemoveUser() {
  MutexLock lock(&mu_);
  if (--num_users_ == 0) changed_.SignalAll();
}

bool SessionClient::WaitUnused(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(&mu_);
  while (num_users_ > 0 && !closing_ && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mu_, deadline - absl::Now());
  }
  return num_users_ == 0;
}

void SessionClient::Enqueue(node::v1::SessionRequest request) {
  if (writes_.size() >= kMaxQueuedWrites) {
    Lose(absl::UnavailableError(absl::StrCat(
        "the cache daemon reads nothing: ", writes_.size(), " messages wait")));
    Cancel();
    return;
  }
  writes_.push_back(std::move(request));
}

void SessionClient::WriteNext() {
  if (writing_ || lost_ || half_closed_) return;
  if (writes_.empty() && !closing_) return;
  writing_ = true;
  ++num_starting_writes_;
  if (writes_.empty()) {
    half_closed_ = true;
    mu_.Unlock();
    stream_->WritesDone(Tag(Op::kHalfClose));
  } else {
    const node::v1::SessionRequest request = std::move(writes_.front());
    writes_.pop_front();
    mu_.Unlock();
    stream_->Write(request, Tag(Op::kWrite));
  }
  mu_.Lock();
  if (--num_starting_writes_ == 0 && closing_) changed_.SignalAll();
}

void SessionClient::Lose(const absl::Status& why) {
  if (lost_) return;
  loss_ = absl::UnavailableError(
      absl::StrCat("the session with the cache daemon at ",
                   options_.socket_path, " has ended: ", why.message()));
  lost_.store(true, std::memory_order_release);
  for (auto& [id, call] : calls_) {
    if (!call->result.has_value()) call->result = loss_;
  }
  writes_.clear();
  releases_.clear();
  WakeAll();
}

void SessionClient::Cancel() {
  if (!finished_ && context_ != nullptr) context_->TryCancel();
}

void* SessionClient::Tag(Op op) {
  static constexpr Op kOps[] = {Op::kStart, Op::kRead, Op::kWrite,
                                Op::kHalfClose, Op::kFinish};
  return const_cast<Op*>(&kOps[static_cast<size_t>(op)]);
}

void SessionClient::WaitUntil(absl::FunctionRef<bool()> done,
                              absl::Time deadline, CondVar* wake) {
  while (!done() && absl::Now() < deadline) {
    if (!taking_events_ && !Ended()) {
      TakeEvent(deadline);
      continue;
    }
    waiting_.push_back(wake);
    wake->WaitWithTimeout(&mu_, deadline - absl::Now());
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), wake));
  }
  PassTurnOn();
}

void SessionClient::PassTurnOn() {
  if (!taking_events_ && !waiting_.empty()) waiting_.front()->Signal();
}

void SessionClient::WakeAll() {
  for (CondVar* const wake : waiting_) wake->Signal();
  changed_.SignalAll();
  attended_.SignalAll();
}

bool SessionClient::Ended() const { return finished_ && !writing_; }

bool SessionClient::TakeEvent(absl::Time deadline) {
  if (Ended()) return false;
  taking_events_ = true;
  mu_.Unlock();
  // Not before: what has been written meanwhile took along how much more the
  // daemon may send. A read that waits before would have it sent alone.
  if (std::exchange(read_due_, false)) stream_->Read(&read_, Tag(Op::kRead));
  void* tag = nullptr;
  bool ok = false;
  const bool came = events_.AsyncNext(&tag, &ok, ToGpr(deadline)) ==
                    grpc::CompletionQueue::GOT_EVENT;
  if (came) OnEvent(*static_cast<const Op*>(tag), ok);
  mu_.Lock();
  taking_events_ = false;
  took_event_ = took_event_ || came;
  return came;
}

void SessionClient::OnEvent(Op op, bool ok) {
  switch (op) {
    case Op::kRead:
      if (ok) {
        Handle(&read_);
        read_due_ = true;
      } else {
        OnStreamClosed();
      }
      return;
    case Op::kStart:
      if (ok) {
        read_due_ = true;
      } else {
        OnStreamClosed();
      }
      OnWritten(ok);
      return;
    case Op::kWrite:
    case Op::kHalfClose:
      OnWritten(ok);
      return;
    case Op::kFinish:
      OnFinished();
      return;
  }
}

void SessionClient::OnWritten(bool ok) {
  MutexLock lock(&mu_);
  writing_ = false;
  if (ok) WriteNext();  // else the read fails as well, and says so
  if (Ended()) WakeAll();
}

void SessionClient::OnStreamClosed() {
  {
    MutexLock lock(&mu_);
    Lose(absl::UnavailableError("the stream is closed"));
  }
  stream_->Finish(&status_, Tag(Op::kFinish));
}

void SessionClient::OnFinished() {
  MutexLock lock(&mu_);
  if (!status_.ok() && !closing_) {
    const absl::Status why = rpc::FromGrpcStatus(status_);
    loss_ = absl::UnavailableError(
        absl::StrCat("the session with the cache daemon at ",
                     options_.socket_path, " has ended: ", why.ToString()));
  }
  finished_ = true;
  WakeAll();
}

void SessionClient::Handle(node::v1::SessionResponse* response) {
  using Message = node::v1::SessionResponse::MessageCase;
  switch (response->message_case()) {
    case Message::kWelcome: {
      MutexLock lock(&mu_);
      greeting_ = response->welcome();
      WakeAll();
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
    case Message::kPendingResolved: {
      node::v1::PendingResolved* resolved =
          response->mutable_pending_resolved();
      {
        MutexLock lock(&mu_);
        const auto watched = watched_.find(resolved->request_id());
        if (watched != watched_.end()) {
          watched->second.resolved[resolved->index()] =
              std::move(*resolved->mutable_reply());
          watched->second.changed.SignalAll();
          return;
        }
      }
      GiveBack(resolved->reply());
      return;
    }
    case Message::kSchemaChanged:
      if (options_.on_schema_changed) {
        MutexLock lock(&mu_);
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
    MutexLock lock(&mu_);
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

}  // namespace promptcache::worker
