#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "cache_daemon/core/module_cache.h"
#include "cache_daemon/core/work_signal.h"

namespace promptcache::daemon {

// Moves modules between tiers and lets them expire: takes decisions from the
// cache, copies without a lock, records the result there.
// Runs on two threads for each device between Start and Stop (or destruction),
// so that no GPU waits for another's copies, and none who reads a module that
// arrives waits for other moves; tests call RunOnce instead. Thread-compatible
// otherwise.
class Mover {
 public:
  struct Options {
    // How often expiry is looked at without a notification.
    absl::Duration tick = absl::Milliseconds(200);
  };
  // `cache` and `signal` (the one in the cache's options) must outlive it.
  Mover(ModuleCache* cache, WorkSignal* signal, const Options& options);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  void Start();
  // Arrivals that nobody has begun then fail, so that no reader waits for them.
  void Stop();
  // One expiry pass and at most one move of each device, arrivals first; false
  // when there was no move to make.
  bool RunOnce();

 private:
  bool RunArrival(uint32_t device);
  bool RunMove(uint32_t device);

  ModuleCache* const cache_;
  WorkSignal* const signal_;
  const Options options_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;  // two a device
};

}  // namespace promptcache::daemon
