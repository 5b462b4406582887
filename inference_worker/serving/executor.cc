#include "inference_worker/serving/executor.h"

#include <utility>

namespace promptcache::worker {

Executor::Executor(uint32_t num_threads) {
  for (uint32_t i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] { Run(); });
  }
}

Executor::~Executor() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void Executor::Add(std::function<void()> task) {
  {
    MutexLock lock(&mu_);
    tasks_.push_back(std::move(task));
  }
  changed_.Signal();
}

void Executor::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mu_);
      while (tasks_.empty() && !stopping_) changed_.Wait(&mu_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace promptcache::worker
