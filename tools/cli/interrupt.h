#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "common/mutex.h"

namespace promptcache::cli {

// Turns SIGINT, SIGTERM and SIGHUP into a call, so that the main thread unwinds
// and its destructors end children and remove files. A second signal ends the
// process at once (children go with it: common/child_process.h). Make it before
// any other thread exists: it blocks the signals, and threads inherit that.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  bool happened() const { return happened_.load(); }
  // Runs `callback` on another thread when a signal comes, or at once when one
  // has come already. One at a time; nullptr: none.
  void SetCallback(std::function<void()> callback) ABSL_LOCKS_EXCLUDED(mu_);
  // False when a signal came before `seconds` were over.
  bool SleepFor(double seconds) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  std::atomic<bool> happened_{false};
  std::atomic<bool> ending_{false};
  Mutex mu_;
  CondVar changed_;
  std::function<void()> callback_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace promptcache::cli
