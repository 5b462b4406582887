#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

#include "common/mutex.h"

namespace promptcache::daemon {

// Runs slow work (disk, sums of memory) in order on one thread, so that no
// gRPC thread waits for it. Bounded. Thread-safe.
class TaskQueue {
 public:
  explicit TaskQueue(size_t max_tasks);
  // Runs what is queued, then ends the thread.
  ~TaskQueue();
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // False, and the task is dropped, when the queue is full.
  bool Add(std::function<void()> task) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);

  const size_t max_tasks_;
  Mutex mu_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: uses all of the above
};

}  // namespace promptcache::daemon
