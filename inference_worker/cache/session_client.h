#pragma once

#include <atomic>
#include <cstdint>
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
#include "inference_worker/cache/imported_memory.h"
#include "inference_worker/cache/session_stream.h"
#include "promptcache/node/v1/node.pb.h"

namespace promptcache::worker {

// One session with the daemon: the mapped memory, and what the messages of its
// stream mean.
//
//   Open --> open --(stream ends, daemon breaks the protocol, Close)--> lost
//
// A lost session stays lost; memory stays mapped as long as somebody holds the
// session, so that views of it never fault. Thread-safe.
//
// Whoever waits for an answer takes gRPC's events meanwhile, in turns
// (SessionStream). While nobody waits it is the thread in Attend, every 2 ms
// or, when nothing goes on, all the time.
//
// Held by the CacheClient, while it is the current one or has leases, and by
// every lease of it. Whoever opened it must Close it before letting go.
class SessionClient final : private SessionStream::Handler {
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
  bool lost() const { return stream_.lost(); }
  absl::Status loss() const ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Until the session is lost. Meanwhile takes what comes while nobody waits
  // for an answer, and sends the releases that no Acquire took along: one
  // thread must be here for as long as there are leases.
  void Attend() ABSL_LOCKS_EXCLUDED(stream_.mu());

  // ---- messages -----------------------------------------------------------

  uint64_t NextRequestId() { return ++last_request_id_; }
  // Sends `request`, which carries `request_id`, and waits for what answers
  // it. RequestFailed becomes its status. What an answer grants after the
  // deadline is given back.
  absl::StatusOr<node::v1::SessionResponse> Call(
      uint64_t request_id, node::v1::SessionRequest request,
      absl::Time deadline) ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Sends without waiting for anything; dropped when the session is lost.
  void Send(node::v1::SessionRequest request) ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Sends an Acquire, and the releases that wait with it; else as Call.
  absl::StatusOr<node::v1::SessionResponse> CallAcquire(
      node::v1::SessionRequest request, absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Ends a lease: with the next Acquire, or within some milliseconds.
  void Release(uint64_t lease_id) ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Gives back what a reply grants.
  void GiveBack(const node::v1::AcquireReply& reply)
      ABSL_LOCKS_EXCLUDED(stream_.mu());

  // Pushes for an Acquire's pending keys are kept between Watch (before the
  // Call) and Unwatch, which gives back those that nobody took. Pushes for
  // others are given back at once.
  void Watch(uint64_t request_id) ABSL_LOCKS_EXCLUDED(stream_.mu());
  void Unwatch(uint64_t request_id) ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Waits for the push of key `index`.
  absl::StatusOr<node::v1::AcquireReply> WaitResolved(uint64_t request_id,
                                                      uint32_t index,
                                                      absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(stream_.mu());

  // The daemon broke the protocol: the session ends.
  void Break(const absl::Status& why) ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Sends what is queued, ends the stream and waits until gRPC is through with
  // it (cancels when that takes long), then lets the channel go. Idempotent.
  void Close() ABSL_LOCKS_EXCLUDED(stream_.mu());

  // ---- users: leases and calls that may become one ------------------------

  // False when the session is lost.
  bool AddUser() ABSL_LOCKS_EXCLUDED(stream_.mu());
  void RemoveUser() ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Until there is none, or Close was called. True: there is none.
  bool WaitUnused(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(stream_.mu());

 private:
  struct PendingCall {
    CondVar done;
    std::optional<absl::StatusOr<node::v1::SessionResponse>> result;
  };
  struct Watched {
    CondVar changed;
    std::map<uint32_t, node::v1::AcquireReply> resolved;  // by index
  };

  SessionClient(const Options& options, ImportedMemory memory);
  node::v1::SessionRequest Hello() const;
  absl::Status Greet() ABSL_LOCKS_EXCLUDED(stream_.mu());
  // Attend, while something goes on and while nothing does.
  void Tick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stream_.mu());
  void Rest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stream_.mu());
  void TellSchemaChanges() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stream_.mu());

  void OnMessage(node::v1::SessionResponse* response) override
      ABSL_LOCKS_EXCLUDED(stream_.mu());
  void OnLost() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(stream_.mu());
  void FinishCall(uint64_t request_id,
                  absl::StatusOr<node::v1::SessionResponse> result)
      ABSL_LOCKS_EXCLUDED(stream_.mu());
  void Resolve(node::v1::PendingResolved* resolved)
      ABSL_LOCKS_EXCLUDED(stream_.mu());
  void EnqueueReleases() ABSL_EXCLUSIVE_LOCKS_REQUIRED(stream_.mu());

  // Const after Open.
  const Options options_;
  ImportedMemory memory_;
  node::v1::Welcome welcome_;

  std::atomic<uint64_t> last_request_id_{0};

  SessionStream stream_;  // with the lock that guards all that follows
  std::optional<node::v1::Welcome> greeting_ ABSL_GUARDED_BY(stream_.mu());

  CondVar unused_;  // or closing
  bool closing_ ABSL_GUARDED_BY(stream_.mu()) = false;
  int num_users_ ABSL_GUARDED_BY(stream_.mu()) = 0;

  CondVar attended_;                                 // for the thread in Attend
  bool used_ ABSL_GUARDED_BY(stream_.mu()) = false;  // since the last tick
  bool resting_ ABSL_GUARDED_BY(stream_.mu()) = false;
  std::vector<uint64_t> releases_ ABSL_GUARDED_BY(stream_.mu());
  std::vector<node::v1::SchemaChanged> schema_changes_
      ABSL_GUARDED_BY(stream_.mu());

  // On the stacks of their callers.
  absl::flat_hash_map<uint64_t, PendingCall*> calls_
      ABSL_GUARDED_BY(stream_.mu());
  std::map<uint64_t, Watched> watched_ ABSL_GUARDED_BY(stream_.mu());
};

}  // namespace promptcache::worker
