#include "inference_worker/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "glog/logging.h"

namespace promptcache::worker::cpu {
namespace {

constexpr uint64_t kOpen = 1 << 16;
constexpr uint64_t kInsideMask = kOpen - 1;
constexpr int kEpochShift = 32;
// Pauses between two yields (about 2 us) and yields before parking (about
// 100 us in all): longer than the serial code between regions of one pass,
// shorter than anything a user would call idle.
constexpr int kPausesPerYield = 64;
constexpr int kYieldsBeforePark = 50;
// A yield that comes back later than this means that the core is wanted.
constexpr auto kContended = std::chrono::microseconds(300);
// Regions that a worker then awaits without spinning.
constexpr uint32_t kSpinDebt = 16;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

uint64_t EpochOf(uint64_t state) { return state >> kEpochShift; }

uint32_t AffinityCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool::ThreadPool(uint32_t num_threads) {
  if (num_threads == 0) num_threads = AffinityCores();
  shares_ = std::make_unique<Share[]>(num_threads);
  threads_.reserve(num_threads - 1);
  for (uint32_t i = 1; i < num_threads; ++i) {
    threads_.emplace_back([this, i] { WorkerLoop(i); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  {
    MutexLock lock(&mu_);
    wake_workers_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::ParallelFor(size_t num_tasks, Body body) {
  CHECK(!running_) << "parallel regions do not nest";
  running_ = true;
  if (threads_.empty() || num_tasks <= 1) {
    for (size_t task = 0; task < num_tasks; ++task) body(task, 0);
    running_ = false;
    return;
  }
  body_ = &body;
  const size_t num_shares = num_threads();
  for (size_t i = 0; i < num_shares; ++i) {
    shares_[i].next.store(num_tasks * i / num_shares,
                          std::memory_order_relaxed);
    shares_[i].end = num_tasks * (i + 1) / num_shares;
  }
  const uint64_t epoch = EpochOf(state_.load(std::memory_order_relaxed)) + 1;
  // seq_cst against num_parked_: either we see the parked worker or it sees
  // the new region.
  state_.store(epoch << kEpochShift | kOpen);
  if (num_parked_.load() > 0) {
    MutexLock lock(&mu_);
    wake_workers_.SignalAll();
  }
  RunTasks(0);
  CloseAndWait();
  body_ = nullptr;
  running_ = false;
}

void ThreadPool::RunTasks(uint32_t thread) {
  const uint32_t num_shares = num_threads();
  for (uint32_t i = 0; i < num_shares; ++i) {
    Share& share = shares_[(thread + i) % num_shares];
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const size_t task = share.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= share.end) break;
      (*body_)(task, thread);
    }
  }
}

void ThreadPool::CloseAndWait() {
  uint64_t state = state_.fetch_and(~kOpen);
  for (int yields = 0; (state & kInsideMask) != 0; ++yields) {
    if (yields == kYieldsBeforePark) {
      MutexLock lock(&mu_);
      caller_parked_.store(true);
      while ((state_.load() & kInsideMask) != 0) wake_caller_.Wait(&mu_);
      caller_parked_.store(false);
      return;
    }
    for (int i = 0; i < kPausesPerYield; ++i) {
      Pause();
      state = state_.load(std::memory_order_acquire);
      if ((state & kInsideMask) == 0) return;
    }
    std::this_thread::yield();
    state = state_.load(std::memory_order_acquire);
  }
}

bool ThreadPool::Join(uint64_t state) {
  const uint64_t epoch = EpochOf(state);
  while ((state & kOpen) != 0 && EpochOf(state) == epoch) {
    if (state_.compare_exchange_weak(state, state + 1)) return true;
  }
  return false;
}

void ThreadPool::Leave() {
  const uint64_t before = state_.fetch_sub(1);
  const bool last = (before & kInsideMask) == 1 && (before & kOpen) == 0;
  if (last && caller_parked_.load()) {
    MutexLock lock(&mu_);
    wake_caller_.Signal();
  }
}

uint64_t ThreadPool::AwaitRegion(uint64_t seen, uint32_t* spin_debt) {
  using Clock = std::chrono::steady_clock;
  const auto news = [&]() -> uint64_t {
    const uint64_t state = state_.load(std::memory_order_acquire);
    return EpochOf(state) != seen ? state : 0;
  };
  if (*spin_debt > 0) {
    --*spin_debt;
    return Park(seen);
  }
  for (int yields = 0; yields < kYieldsBeforePark; ++yields) {
    for (int i = 0; i < kPausesPerYield; ++i) {
      if (const uint64_t state = news(); state != 0) return state;
      Pause();
    }
    const auto before = Clock::now();
    std::this_thread::yield();
    if (Clock::now() - before > kContended) {
      *spin_debt = kSpinDebt;
      break;
    }
  }
  return Park(seen);
}

uint64_t ThreadPool::Park(uint64_t seen) {
  MutexLock lock(&mu_);
  num_parked_.fetch_add(1);
  uint64_t state = state_.load();
  while (EpochOf(state) == seen && !stop_.load()) {
    wake_workers_.Wait(&mu_);
    state = state_.load();
  }
  num_parked_.fetch_sub(1);
  return stop_.load() ? 0 : state;
}

void ThreadPool::WorkerLoop(uint32_t thread) {
  uint64_t seen = 0;
  uint32_t spin_debt = 0;
  for (;;) {
    const uint64_t state = AwaitRegion(seen, &spin_debt);
    if (state == 0) return;
    seen = EpochOf(state);
    if (!Join(state)) continue;
    RunTasks(thread);
    Leave();
  }
}

}  // namespace promptcache::worker::cpu
