#include "cache_daemon/service/task_queue.h"

#include <utility>

namespace promptcache::daemon {

TaskQueue::TaskQueue(size_t max_tasks)
    : max_tasks_(max_tasks), thread_([this] { Run(); }) {}

TaskQueue::~TaskQueue() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    wake_.Signal();
  }
  thread_.join();
}

bool TaskQueue::Add(std::function<void()> task) {
  MutexLock lock(&mu_);
  if (tasks_.size() >= max_tasks_) return false;
  tasks_.push_back(std::move(task));
  wake_.Signal();
  return true;
}

void TaskQueue::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mu_);
      while (tasks_.empty() && !stopping_) wake_.Wait(&mu_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace promptcache::daemon
