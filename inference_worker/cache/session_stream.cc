#include "inference_worker/cache/session_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/endpoints.h"
#include "common/rpc/grpc_status.h"

namespace promptcache::worker {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
// A daemon that reads nothing: beyond this the session is given up.
constexpr size_t kMaxQueuedWrites = 16384;
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);

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

}  // namespace

SessionStream::SessionStream(const std::string& socket_path, Handler* handler)
    : socket_path_(socket_path),
      handler_(handler),
      stub_(node::v1::NodeService::NewStub(NewChannel(socket_path))),
      context_(std::make_unique<grpc::ClientContext>()) {}

void SessionStream::Start(node::v1::SessionRequest first) {
  MutexLock lock(&mu_);
  Enqueue(std::move(first));
  stream_ = stub_->AsyncSession(context_.get(), &events_, Tag(Op::kStart));
}

void SessionStream::WaitUntil(absl::FunctionRef<bool()> done,
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

void SessionStream::TakeWhatCame() {
  while (!took_event_ && !taking_events_ && TakeEvent(absl::UnixEpoch())) {
    took_event_ = false;
  }
  took_event_ = false;
  PassTurnOn();
}

void SessionStream::PassTurnOn() {
  if (!taking_events_ && !waiting_.empty()) waiting_.front()->Signal();
}

void SessionStream::WakeAll() {
  for (CondVar* const wake : waiting_) wake->Signal();
}

void SessionStream::Enqueue(node::v1::SessionRequest request) {
  if (writes_.size() >= kMaxQueuedWrites) {
    Lose(absl::UnavailableError(absl::StrCat(
        "the cache daemon reads nothing: ", writes_.size(), " messages wait")));
    Cancel();
    return;
  }
  writes_.push_back(std::move(request));
}

void SessionStream::WriteNext() {
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
  if (--num_starting_writes_ == 0 && closing_) writes_started_.SignalAll();
}

void SessionStream::Break(const absl::Status& why) {
  MutexLock lock(&mu_);
  Lose(why);
  Cancel();
}

void SessionStream::Close() {
  const absl::Time deadline = absl::Now() + kCloseTimeout;
  // Destroyed after the lock, the channel last.
  std::unique_ptr<node::v1::NodeService::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context;
  {
    MutexLock lock(&mu_);
    closing_ = true;
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
    while (num_starting_writes_ > 0) writes_started_.Wait(&mu_);
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

absl::Status SessionStream::Loss(absl::string_view why) const {
  return absl::UnavailableError(
      absl::StrCat("the session with the cache daemon at ", socket_path_,
                   " has ended: ", why));
}

void SessionStream::Lose(const absl::Status& why) {
  if (lost_) return;
  loss_ = Loss(why.message());
  lost_.store(true, std::memory_order_release);
  writes_.clear();
  handler_->OnLost();
  WakeAll();
}

void SessionStream::Cancel() {
  if (!finished_ && context_ != nullptr) context_->TryCancel();
}

void* SessionStream::Tag(Op op) {
  static constexpr Op kOps[] = {Op::kStart, Op::kRead, Op::kWrite,
                                Op::kHalfClose, Op::kFinish};
  return const_cast<Op*>(&kOps[static_cast<size_t>(op)]);
}

bool SessionStream::Ended() const { return finished_ && !writing_; }

bool SessionStream::TakeEvent(absl::Time deadline) {
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

void SessionStream::OnEvent(Op op, bool ok) {
  switch (op) {
    case Op::kRead:
      if (ok) {
        handler_->OnMessage(&read_);
        read_due_ = true;
      } else {
        OnClosed();
      }
      return;
    case Op::kStart:
      if (ok) {
        read_due_ = true;
      } else {
        OnClosed();
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

void SessionStream::OnWritten(bool ok) {
  MutexLock lock(&mu_);
  writing_ = false;
  if (ok) WriteNext();  // else the read fails as well, and says so
  if (Ended()) WakeAll();
}

void SessionStream::OnClosed() {
  {
    MutexLock lock(&mu_);
    Lose(absl::UnavailableError("the stream is closed"));
  }
  stream_->Finish(&status_, Tag(Op::kFinish));
}

void SessionStream::OnFinished() {
  MutexLock lock(&mu_);
  if (!status_.ok() && !closing_) {
    loss_ = Loss(rpc::FromGrpcStatus(status_).ToString());
  }
  finished_ = true;
  WakeAll();
}

}  // namespace promptcache::worker
