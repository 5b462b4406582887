#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/unique_fd.h"

namespace promptcache {

// A program that was started by this process and must not outlive it: it is
// killed when this object goes and, by PR_SET_PDEATHSIG, when the thread that
// started it dies in any way (so start children from the main thread).
//
// Move-only, thread-compatible. It inherits no descriptor but the standard
// ones, and stands in a process group of its own, so that Ctrl-C reaches the
// parent alone.
class ChildProcess {
 public:
  struct Options {
    std::string program;            // path; PATH is not searched
    std::vector<std::string> args;  // without the program's name
    // Gets standard output and error, appended; "": inherited.
    std::string log_path;
  };

  // NotFound or PermissionDenied, with the path, when it cannot be executed.
  static absl::StatusOr<ChildProcess> Start(const Options& options);

  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  // Stop() with a grace of two seconds.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  bool Running();
  // FailedPrecondition when it has ended.
  absl::Status Signal(int signal_number);
  // How it ended: "exit status 1" or "signal 9". DeadlineExceeded when it still
  // runs after `timeout`.
  absl::StatusOr<std::string> Wait(absl::Duration timeout);
  // SIGTERM, then SIGKILL once `grace` is over. Idempotent.
  void Stop(absl::Duration grace);
  // All that was written to log_path since it was started.
  std::string Log() const;

 private:
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  std::string log_path_;
  int64_t log_begin_ = 0;  // what is before is of earlier runs
  std::string ended_;      // how; empty: it has not been seen to end
};

}  // namespace promptcache
