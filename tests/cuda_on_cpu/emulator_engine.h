#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device_emulator.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#ifdef PC_EMU_TSAN
extern "C" void __tsan_read_range(void* p, unsigned long bytes);
extern "C" void __tsan_write_range(void* p, unsigned long bytes);
#endif

namespace promptcache::gpu::emu {

// Tell the race check what an emulated instruction of the running CUDA thread
// touches.
inline void NoteRead([[maybe_unused]] const void* p,
                     [[maybe_unused]] size_t bytes) {
#ifdef PC_EMU_TSAN
  if (bytes > 0) __tsan_read_range(const_cast<void*>(p), bytes);
#endif
}
inline void NoteWrite([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#ifdef PC_EMU_TSAN
  __tsan_write_range(p, bytes);
#endif
}

// PC_EMU_ORDER: which thread of a block runs next, and blocks likewise.
enum class Order { kForward, kReverse, kRandom };

struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 1;           // PC_EMU_SEED, of kRandom
  bool early_copies = false;   // PC_EMU_CP_ASYNC=early: cp.async at once
  bool eager_streams = false;  // PC_EMU_STREAMS=eager
  bool guard = false;          // PC_EMU_GUARD=1: host code may not touch device
                               // memory
  int num_threads = 0;         // PC_EMU_THREADS; 0: all cores
};
const Settings& GetSettings();

// Reports a fault of the kernel that runs, and aborts.
[[noreturn]] void Die(const char* what);

// What one OS thread runs blocks with: a fiber a CUDA thread, barriers, warps.
// A kernel's fault (divergent barrier, wrong mask, misalignment) ends the
// process with a message that names the thread.
class Engine {
 public:
  static Engine& OfThisThread();

  // Runs all blocks that next_block gives, each to its end. next_block: a
  // block index, or false when none is left.
  void Run(dim3 grid, dim3 block, size_t shared_bytes,
           const std::function<void()>& thread_body,
           const std::function<bool(uint64_t*)>& next_block);

  void WarpCollective(unsigned mask, void* argument, WarpFunction fn);
  void BlockBarrier();
  int BlockReduce(Reduction reduction, bool predicate);
  void CpAsync(void* to, const void* from, size_t bytes, size_t source_bytes);
  void CpAsyncCommit();
  void CpAsyncWait(int pending_groups);
  void* shared() { return shared_; }

  Counters counters = {};

 private:
  static constexpr int kMaxThreads = 1024;
  static constexpr int kScheduler = -1;

  struct Copy {
    void* to;
    const void* from;
    size_t bytes, source_bytes;
    int group;
  };
  struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    void* tsan = nullptr;
    std::vector<Copy> copies;
    int group = 0;
  };
  struct Warp {
    void* arguments[32];
    WarpFunction functions[32];
    unsigned masks[32];
    unsigned arrived, runnable, alive;
    char sync;
  };
  struct Barrier {
    int arrived, phase;
    unsigned waiting[32];
    int reduced[2];
    char sync[2];
  };

  static void FiberMain();
  void Reserve(int threads);
  void RunBlock(uint3 index, size_t shared_bytes);
  void SwitchTo(int thread);
  Fiber& FiberOf(int thread) {
    return thread == kScheduler ? scheduler_
                                : fibers_[static_cast<size_t>(thread)];
  }
  int Pick();  // the next runnable thread; kScheduler: none
  int PickRandom();
  void Yield();
  bool TryWarp(Warp* warp, int lane);
  void CheckBarrier();
  void ThreadDone();

  std::vector<Fiber> fibers_;
  Fiber scheduler_;
  Warp warps_[kMaxThreads / 32];
  Barrier barrier_;
  int num_threads_ = 0, num_warps_ = 0, num_live_ = 0;
  int running_ = kScheduler;
  uint3 thread_index_[kMaxThreads];
  const std::function<void()>* body_ = nullptr;
  unsigned char* shared_ = nullptr;
  uint64_t random_ = 0;
  [[maybe_unused]] void* asan_stack_bottom_ = nullptr;
  [[maybe_unused]] size_t asan_stack_bytes_ = 0;
};

}  // namespace promptcache::gpu::emu
