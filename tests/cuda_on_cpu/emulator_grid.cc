#include "emulator_grid.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "emulator_engine.h"

namespace promptcache::gpu::emu {
namespace {

// std::mutex and not common/mutex.h: nothing of ours is linked here.
class Pool {
 public:
  Pool() {
    const int wanted = GetSettings().num_threads;
    num_threads_ = std::max(
        1, wanted > 0 ? wanted
                      : static_cast<int>(std::thread::hardware_concurrency()));
    for (int i = 1; i < num_threads_; ++i) {
      std::thread([this] { Work(); }).detach();
    }
  }

  void Run(const std::function<void()>& job) {
    {
      std::lock_guard lock(mu_);
      job_ = &job;
      busy_ = num_threads_ - 1;
      ++generation_;
    }
    start_.notify_all();
    job();
    std::unique_lock lock(mu_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void Work() {
    uint64_t seen = 0;
    std::unique_lock lock(mu_);
    for (;;) {
      start_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      const std::function<void()>& job = *job_;
      lock.unlock();
      job();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mu_;
  std::condition_variable start_, done_;
  const std::function<void()>* job_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
  int num_threads_ = 1;
};

// The pool of this process: a forked child has none of its parent's threads.
Pool* ThePool() {
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  if (owner != getpid()) {
    pool = new Pool;
    owner = getpid();
  }
  return pool;
}

std::mutex counters_mu;
Counters total;

void Add(const Counters& more) {
  std::lock_guard lock(counters_mu);
  total.warp_operations += more.warp_operations;
  total.fiber_switches += more.fiber_switches;
  total.matrix_products += more.matrix_products;
  total.async_copies += more.async_copies;
  total.matrix_loads += more.matrix_loads;
  total.bank_conflicts += more.bank_conflicts;
}

// Empty: in order.
std::vector<uint32_t> BlockOrder(uint64_t num_blocks) {
  std::vector<uint32_t> order;
  if (GetSettings().order == Order::kForward) return order;
  order.resize(num_blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::reverse(order.begin(), order.end());
  if (GetSettings().order == Order::kRandom) {
    std::shuffle(order.begin(), order.end(),
                 std::mt19937_64(GetSettings().seed));
  }
  return order;
}

}  // namespace

Counters ReadCounters() {
  std::lock_guard lock(counters_mu);
  return total;
}

void RunGrid(dim3 grid, dim3 block, size_t shared_bytes,
             const std::function<void()>& thread_body) {
  static std::mutex one_grid;
  std::lock_guard lock(one_grid);
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  const std::vector<uint32_t> order = BlockOrder(num_blocks);
  std::atomic<uint64_t> next{0};
  const auto next_block = [&](uint64_t* index) {
    const uint64_t i = next.fetch_add(1);
    if (i >= num_blocks) return false;
    *index = order.empty() ? i : order[i];
    return true;
  };
  const auto work = [&] {
    Engine& engine = Engine::OfThisThread();
    engine.counters = {};
    engine.Run(grid, block, shared_bytes, thread_body, next_block);
    Add(engine.counters);
  };
  if (num_blocks == 1) {
    work();
  } else {
    ThePool()->Run(work);
  }
}

}  // namespace promptcache::gpu::emu
