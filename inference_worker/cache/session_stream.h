#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/node/v1/node.grpc.pb.h"

namespace promptcache::worker {

// A session's stream, over a channel of its own: messages out, messages in,
// and who sees to gRPC's events.
//
//   Start --> open --(it ends, Break, Close)--> lost --> finished
//
// Whoever waits for an answer takes gRPC's events meanwhile: the socket wakes
// that thread itself, where gRPC's callback threads would wake each other first
// and then it. Several that wait take turns. While nobody waits nothing comes
// in, and nothing queued goes out, unless somebody calls TakeWhatCame and
// WriteNext now and then.
//
// Thread-safe. Its owner shares the lock, mu(): what the owner waits for
// changes with what comes in. Knows nothing of what messages mean. Whoever
// started it must Close it before it is destroyed.
class SessionStream final {
 public:
  class Handler {
   public:
    // A message, on the thread that took the event, without the lock. Must not
    // wait: nothing else comes in meanwhile.
    virtual void OnMessage(node::v1::SessionResponse* response) = 0;
    // Once, under the lock: to be noted, no more. Everybody who waits is woken
    // after it.
    virtual void OnLost() = 0;

   protected:
    ~Handler() = default;
  };

  // `handler` must outlive the stream.
  SessionStream(const std::string& socket_path, Handler* handler);
  ~SessionStream() = default;
  SessionStream(const SessionStream&) = delete;
  SessionStream& operator=(const SessionStream&) = delete;

  Mutex* mu() const ABSL_LOCK_RETURNED(mu_) { return &mu_; }
  // Opens it with its first message. Once.
  void Start(node::v1::SessionRequest first) ABSL_LOCKS_EXCLUDED(mu_);

  bool lost() const { return lost_.load(std::memory_order_acquire); }
  // Why it is lost; the daemon's own words once it is finished.
  const absl::Status& loss() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return loss_;
  }
  bool finished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return finished_; }

  // Waits until `done`, which is called under the lock, or the deadline, and
  // takes gRPC's events meanwhile unless another thread does. `wake` is to be
  // signalled when that thread may have made it done.
  void WaitUntil(absl::FunctionRef<bool()> done, absl::Time deadline,
                 CondVar* wake) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes all events there are, without waiting, unless others have taken any
  // since the last call: who asks all the time takes all there is.
  void TakeWhatCame() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Everybody in WaitUntil.
  void WakeAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The stream is lost when too much is queued: the daemon reads nothing.
  void Enqueue(node::v1::SessionRequest request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Starts to write what is to be written next, if anything. Lets go of the
  // lock meanwhile: gRPC serialises and sends on the calling thread.
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Break(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // Sends what is queued, ends the stream and waits until gRPC is through with
  // it (cancels when that takes long), then lets the channel go. Idempotent.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What gRPC tells the end of.
  enum class Op { kStart, kRead, kWrite, kHalfClose, kFinish };
  static void* Tag(Op op);

  // False when none came in time, or none will come any more. Lets go of the
  // lock meanwhile. Only while nobody else is `taking_events_`.
  bool TakeEvent(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PassTurnOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnEvent(Op op, bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnClosed() ABSL_LOCKS_EXCLUDED(mu_);
  void OnFinished() ABSL_LOCKS_EXCLUDED(mu_);
  // gRPC has no more to tell.
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Loss(absl::string_view why) const;
  void Lose(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string socket_path_;
  Handler* const handler_;
  std::atomic<bool> lost_{false};

  grpc::CompletionQueue events_;
  // Used by whoever takes events alone.
  bool read_due_ = false;  // and not started
  node::v1::SessionResponse read_;
  grpc::Status status_;

  mutable Mutex mu_;
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;

  // Nothing can be written before the stream has started.
  bool writing_ ABSL_GUARDED_BY(mu_) = true;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  int num_starting_writes_ ABSL_GUARDED_BY(mu_) = 0;
  CondVar writes_started_;  // when closing
  std::deque<node::v1::SessionRequest> writes_ ABSL_GUARDED_BY(mu_);

  // Taking turns.
  bool taking_events_ ABSL_GUARDED_BY(mu_) = false;
  bool took_event_ ABSL_GUARDED_BY(mu_) = false;        // since TakeWhatCame
  std::vector<CondVar*> waiting_ ABSL_GUARDED_BY(mu_);  // for another's turn

  // Both hold the channel; null once closed.
  std::unique_ptr<node::v1::NodeService::Stub> stub_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mu_);
  // Const from Start until Close finds nobody using it.
  std::unique_ptr<grpc::ClientAsyncReaderWriter<node::v1::SessionRequest,
                                                node::v1::SessionResponse>>
      stream_;
};

}  // namespace promptcache::worker
