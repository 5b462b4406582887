#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/kv_layout.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "inference_worker/cache/imported_memory.h"
#include "promptcache/node/v1/node.grpc.pb.h"

namespace promptcache::worker {

// One session with the daemon: the open stream and the mapped memory.
//
//   Open --> open --(stream ends, daemon breaks the protocol, Close)--> lost
//
// A lost session stays lost; memory stays mapped as long as somebody holds the
// session, so that views of it never fault. Thread-safe.
//
// Whoever waits for an answer takes gRPC's events meanwhile: the socket wakes
// that thread itself, where gRPC's callback threads would wake each other first
// and then it. Several that wait take turns. While nobody waits it is the
// thread in Attend, every 2 ms or, when nothing goes on, all the time.
//
// Held by the CacheClient, while it is the current one or has leases, and by
// every lease of it. Whoever opened it must Close it before letting go.
class SessionClient final {
 public:
  struct Options {
    std::string socket_path;
    std::string worker_id;
    std::string model;
    KvLayout layout;
    gpu::Device* device = nullptr;  // null: the CPU
    bool reads_arriving = false;
    absl::Duration attach_timeout = absl::Seconds(5);
    // On the thread that attends.
    std::function<void(const std::string&, uint64_t)> on_schema_changed;
  };

  // Blocks until the daemon has said welcome.
  static absl::StatusOr<std::shared_ptr<SessionClient>> Open(
      const Options& options);
  ~SessionClient() = default;
  SessionClient(const SessionClient&) = delete;
  SessionClient& operator=(const SessionClient&) = delete;

  const ImportedMemory& memory() const { return memory_; }
  const node::v1::Welcome& welcome() const { return welcome_; }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  absl::Status loss() const ABSL_LOCKS_EXCLUDED(mu_);
  // Until the session is lost. Meanwhile takes what comes while nobody waits
  // for an answer, and sends the releases that no Acquire took along: one
  // thread must be here for as long as there are leases.
  void Attend() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- messages -----------------------------------------------------------

  uint64_t NextRequestId() { return ++last_request_id_; }
  // Sends `request`, which carries `request_id`, and waits for what answers
  // it. RequestFailed becomes its status. What an answer grants after the
  // deadline is given back.
  absl::StatusOr<node::v1::SessionResponse> Call(
      uint64_t request_id, node::v1::SessionRequest request,
      absl::Time deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Sends without waiting for anything; dropped when the session is lost.
  void Send(node::v1::SessionRequest request) ABSL_LOCKS_EXCLUDED(mu_);
  // Sends an Acquire, and the releases that wait with it; else as Call.
  absl::StatusOr<node::v1::SessionResponse> CallAcquire(
      node::v1::SessionRequest request, absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Ends a lease: with the next Acquire, or within some milliseconds.
  void Release(uint64_t lease_id) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives back what a reply grants.
  void GiveBack(const node::v1::AcquireReply& reply) ABSL_LOCKS_EXCLUDED(mu_);

  // Pushes for an Acquire's pending keys are kept between Watch (before the
  // Call) and Unwatch, which gives back those that nobody took. Pushes for
  // others are given back at once.
  void Watch(uint64_t request_id) ABSL_LOCKS_EXCLUDED(mu_);
  void Unwatch(uint64_t request_id) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for the push of key `index`.
  absl::StatusOr<node::v1::AcquireReply> WaitResolved(uint64_t request_id,
                                                      uint32_t index,
                                                      absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(mu_);

  // The daemon broke the protocol: the session ends.
  void Break(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  // Sends what is queued, ends the stream and waits until gRPC is through with
  // it (cancels when that takes long), then lets the channel go. Idempotent.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- users: leases and calls that may become one ------------------------

  // False when the session is lost.
  bool AddUser() ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveUser() ABSL_LOCKS_EXCLUDED(mu_);
  // Until there is none, or Close was called. True: there is none.
  bool WaitUnused(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What gRPC tells the end of.
  enum class Op { kStart, kRead, kWrite, kHalfClose, kFinish };
  static void* Tag(Op op);

  struct PendingCall {
    CondVar done;
    std::optional<absl::StatusOr<node::v1::SessionResponse>> result;
  };
  struct Watched {
    CondVar changed;
    std::map<uint32_t, node::v1::AcquireReply> resolved;  // by index
  };

  SessionClient(const Options& options, ImportedMemory memory);
  void Start() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Greet() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until `done`, which is called under the lock, or the deadline, and
  // takes gRPC's events meanwhile unless another thread does. `wake` is to be
  // signalled when that thread may have made it done.
  void WaitUntil(absl::FunctionRef<bool()> done, absl::Time deadline,
                 CondVar* wake) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // False when none came in time, or none will come any more. Lets go of the
  // lock meanwhile. Only while nobody else is `taking_events_`.
  bool TakeEvent(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PassTurnOn() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnEvent(Op op, bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnStreamClosed() ABSL_LOCKS_EXCLUDED(mu_);
  void OnFinished() ABSL_LOCKS_EXCLUDED(mu_);
  void WakeAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Attend, while something goes on and while nothing does.
  void Tick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Rest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TellSchemaChanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Handle(node::v1::SessionResponse* response) ABSL_LOCKS_EXCLUDED(mu_);
  void FinishCall(uint64_t request_id,
                  absl::StatusOr<node::v1::SessionResponse> result)
      ABSL_LOCKS_EXCLUDED(mu_);
  void EnqueueReleases() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Enqueue(node::v1::SessionRequest request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Starts to write what is to be written next, if anything. Lets go of the
  // lock meanwhile: gRPC serialises and sends on the calling thread.
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Lose(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Const after Open.
  const Options options_;
  ImportedMemory memory_;
  node::v1::Welcome welcome_;

  std::atomic<uint64_t> last_request_id_{0};
  std::atomic<bool> lost_{false};

  grpc::CompletionQueue events_;
  // Used by whoever takes events alone.
  bool read_due_ = false;  // and not started
  node::v1::SessionResponse read_;
  grpc::Status status_;

  mutable Mutex mu_;
  CondVar changed_;   // users, closing, no write being started
  CondVar attended_;  // for the thread in Attend
  std::optional<node::v1::Welcome> greeting_ ABSL_GUARDED_BY(mu_);
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  int num_users_ ABSL_GUARDED_BY(mu_) = 0;

  // The stream. Nothing can be written before it has started.
  bool writing_ ABSL_GUARDED_BY(mu_) = true;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  int num_starting_writes_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<node::v1::SessionRequest> writes_ ABSL_GUARDED_BY(mu_);

  // Taking turns.
  bool taking_events_ ABSL_GUARDED_BY(mu_) = false;
  bool took_event_ ABSL_GUARDED_BY(mu_) = false;        // since the last tick
  std::vector<CondVar*> waiting_ ABSL_GUARDED_BY(mu_);  // for another's turn

  // Attending.
  bool used_ ABSL_GUARDED_BY(mu_) = false;  // since the last tick
  bool resting_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<uint64_t> releases_ ABSL_GUARDED_BY(mu_);
  std::vector<node::v1::SchemaChanged> schema_changes_ ABSL_GUARDED_BY(mu_);

  // On the stacks of their callers.
  absl::flat_hash_map<uint64_t, PendingCall*> calls_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Watched> watched_ ABSL_GUARDED_BY(mu_);

  // Both hold the channel; null once closed.
  std::unique_ptr<node::v1::NodeService::Stub> stub_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mu_);
  // Const from Start until Close finds nobody using it.
  std::unique_ptr<grpc::ClientAsyncReaderWriter<node::v1::SessionRequest,
                                                node::v1::SessionResponse>>
      stream_;
};

}  // namespace promptcache::worker
