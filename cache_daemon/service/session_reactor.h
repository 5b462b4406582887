#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/process_watcher.h"
#include "cache_daemon/registry/module_log.h"
#include "cache_daemon/service/fd_server.h"
#include "cache_daemon/service/task_queue.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "promptcache/node/v1/node.grpc.pb.h"

namespace promptcache::daemon {

class SessionReactor;

// The sessions that are open, for what concerns all of them. Thread-safe.
class SessionHub {
 public:
  explicit SessionHub(size_t max_sessions) : max_sessions_(max_sessions) {}

  // False when there are too many.
  bool Add(std::shared_ptr<SessionReactor> session) ABSL_LOCKS_EXCLUDED(mu_);
  void Remove(const SessionReactor* session) ABSL_LOCKS_EXCLUDED(mu_);
  // Revision 0: deleted.
  void TellSchemaChanged(const std::string& name, uint64_t revision)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The daemon goes: ends all of them, and refuses new ones.
  void EndAll() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  std::vector<std::shared_ptr<SessionReactor>> All() const
      ABSL_LOCKS_EXCLUDED(mu_);

  const size_t max_sessions_;
  mutable Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<const SessionReactor*, std::shared_ptr<SessionReactor>>
      sessions_ ABSL_GUARDED_BY(mu_);
};

// What sessions need of the daemon. All of it outlives them.
struct SessionDeps {
  ModuleCache* cache = nullptr;
  ProcessWatcher* processes = nullptr;
  FdServer* fd_server = nullptr;
  ModuleLog* module_log = nullptr;
  TaskQueue* tasks = nullptr;
  SessionHub* hub = nullptr;
  const Clock* clock = nullptr;
  std::string daemon_id;
  // Answers that wait for a client that does not read; beyond either it is
  // cut off.
  size_t max_queued_messages = 4096;
  size_t max_queued_bytes = size_t{16} << 20;
};

// One worker's stream.
//
//   new --Hello--> open --> ended
//
// Every end, whoever causes it, goes through End, once: the core's session is
// closed there and gRPC's call finished. Requests are handled one at a time, in
// the order in which they came; answers and pushes are queued and written one
// at a time. A push about a request never overtakes that request's answer.
//
// Thread-safe. Held by: gRPC until OnDone (self_), the hub while it is open,
// and whoever is pushing to it.
class SessionReactor final
    : public grpc::ServerBidiReactor<node::v1::SessionRequest,
                                     node::v1::SessionResponse>,
      public std::enable_shared_from_this<SessionReactor> {
 public:
  // `deps` must outlive the stream.
  static SessionReactor* Start(const SessionDeps* deps,
                               grpc::CallbackServerContext* context);

  void Push(const node::v1::SessionResponse& response) ABSL_LOCKS_EXCLUDED(mu_);
  // `cut_off`: do not wait for the client to take what is on its way.
  void End(const absl::Status& status, bool cut_off = false)
      ABSL_LOCKS_EXCLUDED(mu_);

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Queued {
    node::v1::SessionResponse response;
    size_t num_bytes = 0;
  };

  SessionReactor(const SessionDeps* deps, grpc::CallbackServerContext* context)
      : deps_(*deps), context_(context) {}

  absl::Status Handle(const node::v1::SessionRequest& request);
  absl::Status HandleHello(const node::v1::Hello& hello)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<SessionId> OpenSession(const node::v1::Hello& hello);
  absl::Status HandleAcquire(const node::v1::AcquireRequest& request)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status HandleCommit(const node::v1::CommitRequest& request);
  absl::Status HandleSetPolicy(const node::v1::SetPolicyRequest& request);
  absl::Status HandleReport(const node::v1::ReportCorruption& report);
  void OnResolved(const PendingResolved& resolved) ABSL_LOCKS_EXCLUDED(mu_);
  void Record(const std::vector<CommitModule>& modules,
              const std::vector<CommitResult>& results);
  // False when the queue is full.
  bool Enqueue(node::v1::SessionResponse response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Write(node::v1::SessionResponse response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SessionDeps& deps_;
  grpc::CallbackServerContext* const context_;  // gRPC's, valid until OnDone
  std::shared_ptr<SessionReactor> self_;        // until OnDone

  // Used by reads alone, which are one at a time.
  node::v1::SessionRequest read_;
  SessionId open_session_{};
  PageShape shape_;
  uint32_t device_ = 0;  // of the pool
  // Identities of modules asked for and not committed yet, for the registry.
  absl::flat_hash_map<ModuleKey, IdentityParts> parts_;

  // gRPC's while it is being written.
  node::v1::SessionResponse write_;

  Mutex mu_;
  SessionId session_ ABSL_GUARDED_BY(mu_){};
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Queued> writes_ ABSL_GUARDED_BY(mu_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // The Acquire whose answer is being made, and pushes about it.
  std::optional<uint64_t> acquiring_ ABSL_GUARDED_BY(mu_);
  std::vector<node::v1::SessionResponse> held_back_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::daemon
