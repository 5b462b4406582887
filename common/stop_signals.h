#pragma once

#include <string>
#include <thread>

#include "common/mutex.h"

namespace promptcache {

// SIGTERM and SIGINT of a server. While it starts, which can take minutes, a
// signal ends the process at once, with exit status 0: nothing is served yet,
// and what was taken goes with the process. From Defer() on a signal waits for
// Wait(). Make it before any other thread exists: it blocks the signals, and
// threads inherit that.
// Thread-safe.
class StopSignals {
 public:
  // `program`: who says that it stops, on standard error.
  explicit StopSignals(const std::string& program);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void Defer() ABSL_LOCKS_EXCLUDED(mu_);
  // Until a signal comes, or has come since Defer(): its number.
  int Wait() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const std::string program_;

  Mutex mu_;
  CondVar came_;
  bool deferred_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  int signal_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;
};

}  // namespace promptcache
