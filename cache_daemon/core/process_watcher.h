#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/statusor.h"
#include "cache_daemon/core/types.h"
#include "common/mutex.h"
#include "common/unique_fd.h"

namespace promptcache::daemon {

// Knows which worker processes live. An interface, so that tests decide when a
// process dies. Thread-safe.
class ProcessWatcher {
 public:
  virtual ~ProcessWatcher() = default;
  // The identity of the process behind `pidfd`: the same for every call about
  // the same living process (unless it is in another PID namespace and the
  // kernel before 6.9: then each call has one), never reused for another.
  // InvalidArgument when the descriptor is no pidfd, or one of another process
  // than `pid`.
  virtual absl::StatusOr<ProcessId> Watch(UniqueFd pidfd, pid_t pid) = 0;
};

// Polls pidfds on a thread of its own. Death is told once per process, at most
// some milliseconds after it happened, also for one that was dead when Watch
// was called: never inside Watch, possibly before it has returned.
class PidfdWatcher final : public ProcessWatcher {
 public:
  using DeathFn = std::function<void(ProcessId)>;
  // `on_death` runs on the watcher's thread, without its lock; it may not call
  // back into the watcher's destructor.
  static absl::StatusOr<std::unique_ptr<PidfdWatcher>> Create(DeathFn on_death);
  ~PidfdWatcher() override;  // joins the thread

  absl::StatusOr<ProcessId> Watch(UniqueFd pidfd, pid_t pid) override
      ABSL_LOCKS_EXCLUDED(mu_);
  size_t num_watched() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Watched {
    UniqueFd pidfd;
    pid_t pid = 0;
  };
  PidfdWatcher(DeathFn on_death, UniqueFd wake);
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void Wake() const;

  const DeathFn on_death_;
  const UniqueFd wake_;  // eventfd: the set changed, or stop

  mutable Mutex mu_;
  std::map<ProcessId, Watched> watched_ ABSL_GUARDED_BY(mu_);
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;  // last: starts when all else is there
};

// The process that a pidfd names, as /proc/self/fdinfo tells: InvalidArgument
// for another kind of descriptor, NotFound when the process is gone, or lives
// in a PID namespace that cannot be seen from this one.
absl::StatusOr<pid_t> PidOfPidfd(int pidfd);
// Whether two pidfds are of one process, wherever it lives; nothing where the
// kernel cannot say (before Linux 6.9).
std::optional<bool> SameProcess(int pidfd, int other);

}  // namespace promptcache::daemon
