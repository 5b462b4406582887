#include "emulator_engine.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PC_EMU_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define PC_EMU_ASAN 1
#endif
#ifdef PC_EMU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
// The race check: kernels are built with -fsanitize=thread, the emulator
// without it, so that only accesses of CUDA threads are watched and only CUDA
// barriers order them.
#ifdef PC_EMU_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifndef __x86_64__
#error "the emulator's context switch is written for x86-64"
#endif

// Saves the callee-saved registers and changes stacks.
extern "C" void PromptcacheSwitchStacks(void** save, void* to);
asm(R"(.text
.globl PromptcacheSwitchStacks
.type PromptcacheSwitchStacks,@function
PromptcacheSwitchStacks:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size PromptcacheSwitchStacks,.-PromptcacheSwitchStacks
)");

namespace promptcache::gpu::emu {
namespace {

constexpr size_t kStackBytes = size_t{192} << 10;
constexpr size_t kGuardBytes = 4096;

void TsanRelease(void* p) {
#ifdef PC_EMU_TSAN
  __tsan_release(p);
#else
  (void)p;
#endif
}

void TsanAcquire(void* p) {
#ifdef PC_EMU_TSAN
  __tsan_acquire(p);
#else
  (void)p;
#endif
}

bool EnvironmentIs(const char* name, std::string_view value) {
  const char* text = std::getenv(name);
  return text != nullptr && value == text;
}

int64_t EnvironmentNumber(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// A stack that, switched to, enters `entry`.
void* NewContext(char* stack, size_t bytes, void (*entry)()) {
  // rsp % 16 == 8 at the entry of a function.
  auto* top = reinterpret_cast<void**>(stack + bytes) - 2;
  *top = reinterpret_cast<void*>(entry);
  top -= 6;
  std::memset(top, 0, 6 * sizeof(void*));
  return top;
}

}  // namespace

__thread Current current;

const Settings& GetSettings() {
  static const Settings settings = [] {
    Settings s;
    if (EnvironmentIs("PC_EMU_ORDER", "reverse")) s.order = Order::kReverse;
    if (EnvironmentIs("PC_EMU_ORDER", "random")) s.order = Order::kRandom;
    s.seed = static_cast<uint64_t>(EnvironmentNumber("PC_EMU_SEED", 1));
    s.early_copies = EnvironmentIs("PC_EMU_CP_ASYNC", "early");
    s.eager_streams = EnvironmentIs("PC_EMU_STREAMS", "eager");
    s.guard = EnvironmentIs("PC_EMU_GUARD", "1");
    s.num_threads = static_cast<int>(EnvironmentNumber("PC_EMU_THREADS", 0));
    return s;
  }();
  return settings;
}

void Die(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s: block (%u,%u,%u) thread (%u,%u,%u)\n",
               what, current.block.x, current.block.y, current.block.z,
               current.thread.x, current.thread.y, current.thread.z);
  std::abort();
}

Engine& Engine::OfThisThread() {
  // Never freed: fibers' stacks outlive the thread's other thread-locals.
  static thread_local Engine* const kEngine = new Engine;
  return *kEngine;
}

void Engine::Reserve(int threads) {
  const size_t before = fibers_.size();
  if (before >= static_cast<size_t>(threads)) return;
  fibers_.resize(static_cast<size_t>(threads));
  for (size_t i = before; i < fibers_.size(); ++i) {
    Fiber& fiber = fibers_[i];
    void* const memory =
        mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) Die("no memory for a thread's stack");
    // A kernel that overruns its stack faults.
    mprotect(memory, kGuardBytes, PROT_NONE);
    fiber.stack = static_cast<char*>(memory) + kGuardBytes;
    // Staggered: stacks of a warp spread over the first-level cache's sets.
    fiber.stack_pointer =
        NewContext(fiber.stack, kStackBytes - (i % 32) * 64, FiberMain);
#ifdef PC_EMU_TSAN
    fiber.tsan = __tsan_create_fiber(0);
#endif
  }
}

void Engine::SwitchTo(int thread) {
  const int from = running_;
  running_ = thread;
  if (thread != kScheduler) {
    current.linear_thread = static_cast<uint32_t>(thread);
    current.thread = thread_index_[thread];
  }
  ++counters.fiber_switches;
#ifdef PC_EMU_TSAN
  __tsan_switch_to_fiber(FiberOf(thread).tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef PC_EMU_ASAN
  void* fake_stack;
  const bool scheduler = thread == kScheduler;
  __sanitizer_start_switch_fiber(
      &fake_stack, scheduler ? asan_stack_bottom_ : FiberOf(thread).stack,
      scheduler ? asan_stack_bytes_ : kStackBytes);
#endif
  PromptcacheSwitchStacks(&FiberOf(from).stack_pointer,
                          FiberOf(thread).stack_pointer);
#ifdef PC_EMU_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

int Engine::PickRandom() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  const auto first =
      static_cast<int>(random_ % static_cast<unsigned>(num_warps_));
  const auto lane = static_cast<int>((random_ >> 32) & 31);
  for (int k = 0; k < num_warps_; ++k) {
    const int warp = (first + k) % num_warps_;
    const unsigned runnable = warps_[warp].runnable;
    if (runnable == 0) continue;
    const unsigned turned =
        lane == 0 ? runnable : (runnable >> lane) | (runnable << (32 - lane));
    return warp * 32 + ((__builtin_ctz(turned) + lane) & 31);
  }
  return kScheduler;
}

int Engine::Pick() {
  const Order order = GetSettings().order;
  if (order == Order::kRandom) return PickRandom();
  const bool reverse = order == Order::kReverse;
  const bool fresh = running_ == kScheduler;
  const int first = fresh ? (reverse ? num_warps_ - 1 : 0) : running_ >> 5;
  const int lane = fresh ? (reverse ? 31 : 0) : running_ & 31;
  for (int k = 0; k < num_warps_; ++k) {
    const int step = reverse ? num_warps_ - k : k;
    const int warp = (first + step) % num_warps_;
    const unsigned runnable = warps_[warp].runnable;
    if (runnable == 0) continue;
    if (reverse) {
      const unsigned below = k == 0 ? runnable & ((1u << lane) - 1) : 0;
      return warp * 32 + 31 - __builtin_clz(below != 0 ? below : runnable);
    }
    const unsigned above = k == 0 ? runnable & ~((2u << lane) - 1) : 0;
    return warp * 32 + __builtin_ctz(above != 0 ? above : runnable);
  }
  return kScheduler;
}

void Engine::Yield() {
  int next;
  const unsigned above =
      warps_[running_ >> 5].runnable & ~((2u << (running_ & 31)) - 1);
  if (GetSettings().order == Order::kForward && above != 0) {
    next = (running_ & ~31) + __builtin_ctz(above);  // the common case
  } else {
    next = Pick();
  }
  if (next == kScheduler) {
    Die("deadlock: a divergent barrier or warp operation");
  }
  if (next != running_) SwitchTo(next);
}

// Runs the collective that `lane` waits for if every live lane of its mask has
// arrived.
bool Engine::TryWarp(Warp* warp, int lane) {
  const unsigned needed = warp->masks[lane] & warp->alive;
  if ((warp->arrived & needed) != needed) return false;
  for (unsigned left = needed; left != 0; left &= left - 1) {
    const int other = __builtin_ctz(left);
    if (warp->functions[other] != warp->functions[lane] ||
        warp->masks[other] != warp->masks[lane]) {
      Die("lanes of one mask are in different warp operations");
    }
  }
  warp->functions[lane](warp->arguments, needed);
  ++counters.warp_operations;
  warp->arrived &= ~needed;
  warp->runnable |= needed;
  return true;
}

void Engine::WarpCollective(unsigned mask, void* argument, WarpFunction fn) {
  const int lane = running_ & 31;
  Warp& warp = warps_[running_ >> 5];
  if ((mask >> lane & 1) == 0) {
    Die("a warp operation whose mask leaves out its caller");
  }
  TsanRelease(&warp.sync);
  TsanAcquire(&warp.sync);
  warp.arguments[lane] = argument;
  warp.functions[lane] = fn;
  warp.masks[lane] = mask;
  warp.arrived |= 1u << lane;
  if (TryWarp(&warp, lane)) {
    TsanRelease(&warp.sync);
  } else {
    warp.runnable &= ~(1u << lane);
    Yield();
  }
  TsanAcquire(&warp.sync);
}

void Engine::CheckBarrier() {
  if (barrier_.arrived == 0 || barrier_.arrived < num_live_) return;
  for (int w = 0; w < num_warps_; ++w) {
    warps_[w].runnable |= barrier_.waiting[w];
    barrier_.waiting[w] = 0;
  }
  barrier_.arrived = 0;
  ++barrier_.phase;
}

void Engine::BlockBarrier() {
  const int warp = running_ >> 5;
  const unsigned bit = 1u << (running_ & 31);
  void* const sync = &barrier_.sync[barrier_.phase & 1];
  TsanRelease(sync);
  ++barrier_.arrived;
  barrier_.waiting[warp] |= bit;
  warps_[warp].runnable &= ~bit;
  CheckBarrier();
  if ((warps_[warp].runnable & bit) == 0) Yield();
  TsanAcquire(sync);
}

int Engine::BlockReduce(Reduction reduction, bool predicate) {
  int& value = barrier_.reduced[barrier_.phase & 1];
  if (barrier_.arrived == 0) value = reduction == Reduction::kAnd ? 1 : 0;
  const int p = predicate ? 1 : 0;
  switch (reduction) {
    case Reduction::kCount:
      value += p;
      break;
    case Reduction::kAnd:
      value &= p;
      break;
    case Reduction::kOr:
      value |= p;
      break;
  }
  BlockBarrier();
  return value;
}

void Engine::CpAsync(void* to, const void* from, size_t bytes,
                     size_t source_bytes) {
  ++counters.async_copies;
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
      (source_bytes > 0 && reinterpret_cast<uintptr_t>(from) % bytes != 0)) {
    Die("misaligned cp.async");
  }
  NoteRead(from, source_bytes);
  NoteWrite(to, bytes);
  Fiber& fiber = FiberOf(running_);
  fiber.copies.push_back({to, from, bytes, source_bytes, fiber.group});
  if (GetSettings().early_copies) {
    CpAsyncWait(-1);
  } else {
    std::memset(to, 0xff, bytes);  // not there until the wait says so
  }
}

void Engine::CpAsyncCommit() { ++FiberOf(running_).group; }

// pending_groups < 0: all, committed or not.
void Engine::CpAsyncWait(int pending_groups) {
  Fiber& fiber = FiberOf(running_);
  size_t landed = 0;
  for (const Copy& copy : fiber.copies) {
    if (pending_groups >= 0 && copy.group >= fiber.group - pending_groups) {
      break;
    }
    NoteWrite(copy.to, copy.bytes);
    if (copy.source_bytes > 0) {
      std::memcpy(copy.to, copy.from, copy.source_bytes);
    }
    std::memset(static_cast<char*>(copy.to) + copy.source_bytes, 0,
                copy.bytes - copy.source_bytes);
    ++landed;
  }
  fiber.copies.erase(fiber.copies.begin(),
                     fiber.copies.begin() + static_cast<ptrdiff_t>(landed));
}

void Engine::ThreadDone() {
  Warp& warp = warps_[running_ >> 5];
  const unsigned bit = 1u << (running_ & 31);
  warp.runnable &= ~bit;
  warp.alive &= ~bit;
  --num_live_;
  FiberOf(running_).copies.clear();
  FiberOf(running_).group = 0;
  for (unsigned left = warp.arrived; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    if ((warp.arrived >> lane & 1) != 0) TryWarp(&warp, lane);
  }
  CheckBarrier();
  TsanRelease(this);
  const int next = num_live_ > 0 ? Pick() : kScheduler;
  if (num_live_ > 0 && next == kScheduler) {
    Die("deadlock after a thread returned");
  }
  SwitchTo(next);
}

void Engine::FiberMain() {
  Engine& engine = OfThisThread();
#ifdef PC_EMU_ASAN
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (engine.asan_stack_bottom_ == nullptr) {
    engine.asan_stack_bottom_ = const_cast<void*>(bottom);
    engine.asan_stack_bytes_ = bytes;
  }
#endif
  for (;;) {
    TsanAcquire(&engine);
    (*engine.body_)();
    engine.ThreadDone();
  }
}

void Engine::RunBlock(uint3 index, size_t shared_bytes) {
  current.block = index;
  num_live_ = num_threads_;
  num_warps_ = (num_threads_ + 31) / 32;
  for (int w = 0; w < num_warps_; ++w) {
    const int lanes = num_threads_ - w * 32;
    warps_[w].arrived = 0;
    warps_[w].alive = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    warps_[w].runnable = warps_[w].alive;
  }
  barrier_ = {};
  if (shared_bytes > 0) std::memset(shared_, 0xff, shared_bytes);  // NaN
  running_ = kScheduler;
  TsanRelease(this);
  SwitchTo(Pick());
  TsanAcquire(this);
}

void Engine::Run(dim3 grid, dim3 block, size_t shared_bytes,
                 const std::function<void()>& thread_body,
                 const std::function<bool(uint64_t*)>& next_block) {
#ifdef PC_EMU_TSAN
  scheduler_.tsan = __tsan_get_current_fiber();
#endif
  num_threads_ = static_cast<int>(block.x * block.y * block.z);
  body_ = &thread_body;
  Reserve(num_threads_);
  shared_ = shared_bytes == 0 ? nullptr
                              : static_cast<unsigned char*>(std::aligned_alloc(
                                    1024, (shared_bytes + 1023) / 1024 * 1024));
  current.block_size = {block.x, block.y, block.z};
  current.grid_size = {grid.x, grid.y, grid.z};
  for (unsigned i = 0; i < static_cast<unsigned>(num_threads_); ++i) {
    thread_index_[i] = {i % block.x, i / block.x % block.y,
                        i / block.x / block.y};
  }
  uint64_t i;
  while (next_block(&i)) {
    random_ = (GetSettings().seed + i) * 0x9e3779b97f4a7c15u | 1;
    RunBlock({static_cast<unsigned>(i % grid.x),
              static_cast<unsigned>(i / grid.x % grid.y),
              static_cast<unsigned>(i / grid.x / grid.y)},
             shared_bytes);
  }
  std::free(shared_);
}

}  // namespace promptcache::gpu::emu
