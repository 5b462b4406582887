#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
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
// Held by the CacheClient, while it is the current one or has leases, and by
// every lease of it. Whoever opened it must Close it before letting go, on a
// thread that is not gRPC's: the channel is destroyed there, and gRPC's
// callback threads end with the last channel that uses them, which must not
// happen on one of them (gRPC 1.51 would join the thread with itself).
class SessionClient final
    : public grpc::ClientBidiReactor<node::v1::SessionRequest,
                                     node::v1::SessionResponse> {
 public:
  struct Options {
    std::string socket_path;
    std::string worker_id;
    std::string model;
    KvLayout layout;
    gpu::Device* device = nullptr;  // null: the CPU
    bool reads_arriving = false;
    absl::Duration attach_timeout = absl::Seconds(5);
    std::function<void(const std::string&, uint64_t)> on_schema_changed;
  };

  // Blocks until the daemon has said welcome.
  static absl::StatusOr<std::shared_ptr<SessionClient>> Open(
      const Options& options);

  const ImportedMemory& memory() const { return *memory_; }
  const node::v1::Welcome& welcome() const { return welcome_; }
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  absl::Status loss() const ABSL_LOCKS_EXCLUDED(mu_);
  // Until the session is lost. Meanwhile sends the releases that no Acquire
  // took along: one thread must be here for as long as there are leases.
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

  // ---- gRPC's -------------------------------------------------------------
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnDone(const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct PendingCall {
    CondVar done;
    std::optional<absl::StatusOr<node::v1::SessionResponse>> result;
  };
  struct Watched {
    CondVar changed;
    std::map<uint32_t, node::v1::AcquireReply> resolved;  // by index
  };

  explicit SessionClient(const Options& options);
  void Start() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Greet() ABSL_LOCKS_EXCLUDED(mu_);
  void Handle(node::v1::SessionResponse* response) ABSL_LOCKS_EXCLUDED(mu_);
  void FinishCall(uint64_t request_id,
                  absl::StatusOr<node::v1::SessionResponse> result)
      ABSL_LOCKS_EXCLUDED(mu_);
  void EnqueueReleases() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Enqueue(node::v1::SessionRequest request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes what is to be written next, if anything: the caller lets go of the
  // lock and calls StartTaken with it. gRPC serialises and sends on the calling
  // thread, and tells at once that it has written: whoever it tells would find
  // the lock taken.
  enum class Taken { kNothing, kMessage, kHalfClose };
  [[nodiscard]] Taken TakeWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartTaken(Taken taken) ABSL_LOCKS_EXCLUDED(mu_);
  void Lose(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Cancel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Const after Open.
  const Options options_;
  std::optional<ImportedMemory> memory_;
  node::v1::Welcome welcome_;

  std::atomic<uint64_t> last_request_id_{0};
  std::atomic<bool> lost_{false};

  // gRPC's until the operation on it is done.
  node::v1::SessionResponse read_;
  node::v1::SessionRequest write_;

  mutable Mutex mu_;
  CondVar changed_;   // welcomed, lost, done, users
  CondVar attended_;  // lost, and a release where none came for long
  std::optional<node::v1::Welcome> greeting_ ABSL_GUARDED_BY(mu_);
  absl::Status loss_ ABSL_GUARDED_BY(mu_);
  bool started_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  int num_users_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<node::v1::SessionRequest> writes_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> releases_ ABSL_GUARDED_BY(mu_);
  absl::Time last_release_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool attending_asleep_ ABSL_GUARDED_BY(mu_) = false;
  // On the stacks of their callers.
  absl::flat_hash_map<uint64_t, PendingCall*> calls_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Watched> watched_ ABSL_GUARDED_BY(mu_);
  // Both hold the channel; null once closed.
  std::unique_ptr<node::v1::NodeService::Stub> stub_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::worker
