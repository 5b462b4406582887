#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace promptcache::worker::cpu {

// Fixed threads for short parallel regions (a decode step has about 150 of
// them). The calling thread takes part, so `num_threads` 1 has no thread.
//
// Between regions a worker spins for a moment, since a futex hand-off costs
// about 20 us here and a region often less; it parks soon, and at once while
// it finds that other load wants its core (a yield that came back late). A
// worker that does not wake in time is not waited for: the caller and whoever
// is awake do its share.
//
// Thread-compatible: one region at a time, started by one thread; regions do
// not nest (checked).
class ThreadPool {
 public:
  using Body = absl::FunctionRef<void(size_t task, uint32_t thread)>;

  // 0: the cores of the process's affinity mask.
  explicit ThreadPool(uint32_t num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body(task, thread) once for every task in [0, num_tasks); `thread` <
  // num_threads() is the caller's index into per-thread scratch. A thread
  // first takes tasks from its own contiguous share, in order, then from the
  // shares of others. What the calls wrote is visible when this returns.
  void ParallelFor(size_t num_tasks, Body body) ABSL_LOCKS_EXCLUDED(mu_);

  uint32_t num_threads() const {
    return static_cast<uint32_t>(threads_.size()) + 1;
  }

 private:
  struct alignas(64) Share {
    std::atomic<size_t> next{0};
    size_t end = 0;
  };

  void WorkerLoop(uint32_t thread) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for a region after `seen` (spinning, then parked); 0: stop.
  uint64_t AwaitRegion(uint64_t seen, uint32_t* spin_debt)
      ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t Park(uint64_t seen) ABSL_LOCKS_EXCLUDED(mu_);
  // Joins the open region `state` names; false when it closed meanwhile.
  bool Join(uint64_t state);
  void Leave() ABSL_LOCKS_EXCLUDED(mu_);
  void RunTasks(uint32_t thread);
  void CloseAndWait() ABSL_LOCKS_EXCLUDED(mu_);

  // epoch << 32 | open << 16 | workers inside. The region's fields below are
  // written only while it is closed and empty.
  std::atomic<uint64_t> state_{0};
  const Body* body_ = nullptr;
  std::unique_ptr<Share[]> shares_;
  bool running_ = false;

  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> num_parked_{0};
  std::atomic<bool> caller_parked_{false};
  Mutex mu_;
  CondVar wake_workers_;
  CondVar wake_caller_;
  std::vector<std::thread> threads_;
};

}  // namespace promptcache::worker::cpu
