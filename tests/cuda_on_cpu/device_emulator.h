#pragma once

// Runs CUDA C++ kernels on the CPU: what cuda/kernels/device.cuh includes where
// no nvcc is. A CUDA thread is a fiber; a block stays on one OS thread and runs
// to its end; lanes and blocks run in an order that PC_EMU_ORDER chooses. Types
// and half/bf16 arithmetic come from the toolkit's own headers, which work in
// host code.

#include <cuda_runtime_api.h>
//
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __shared__
#undef __constant__
#undef __grid_constant__
#define __shared__ static thread_local  // a block never leaves its OS thread
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)

namespace promptcache::gpu::emu {

// The running CUDA thread.
struct Current {
  uint3 thread, block, block_size, grid_size;
  uint32_t linear_thread;
};
// __thread: no call of an initialiser at each access.
extern __thread Current current;
inline uint32_t Lane() { return current.linear_thread & 31; }

// Of all launches so far, summed over OS threads.
struct Counters {
  uint64_t warp_operations, fiber_switches, matrix_products, async_copies;
  // ldmatrix reads of 8 rows, and the extra passes that they take on a GPU.
  uint64_t matrix_loads, bank_conflicts;
};
Counters ReadCounters();

// Runs fn once for all lanes of `mask`, when the last of them has arrived.
using WarpFunction = void (*)(void** arguments, unsigned mask);
void WarpCollective(unsigned mask, void* argument, WarpFunction fn);
// Of the threads of the block that have not returned.
void BlockBarrier();
enum class Reduction { kCount, kAnd, kOr };
int BlockReduce(Reduction reduction, bool predicate);

void* DynamicShared();

// A copy's bytes are there (NaN until then) after the wait for its group.
void CpAsync(void* to, const void* from, size_t bytes, size_t source_bytes);
void CpAsyncCommit();
void CpAsyncWait(int pending_groups);

enum class Operand { kBf16, kFp16 };
void Mma16816(Operand type, float* d, const uint32_t* a, uint32_t b0,
              uint32_t b1);
void LoadMatrix(uint32_t* out, const void* row, bool transposed);

// In stream order: a host-side operation (libraries' stand-ins), a launch.
// Errors as the runtime gives them, through cudaGetLastError.
void Enqueue(cudaStream_t stream, std::function<void()> operation);
void EnqueueLaunch(const void* kernel, dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> thread_body);

template <class... P, class... A>
void Launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, A&&... args) {
  std::tuple<std::decay_t<P>...> values(std::forward<A>(args)...);
  EnqueueLaunch(reinterpret_cast<const void*>(kernel), grid, block,
                shared_bytes, stream,
                [kernel, values] { std::apply(kernel, values); });
}

template <class T>
T Shuffle(unsigned mask, T value, uint32_t source) {
  struct Argument {
    T in, out;
    uint32_t source;
  } argument = {value, value, source};
  WarpCollective(mask, &argument, [](void** arguments, unsigned lanes) {
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      auto* a = static_cast<Argument*>(arguments[__builtin_ctz(left)]);
      if ((lanes >> a->source & 1) == 0) continue;
      a->out = static_cast<Argument*>(arguments[a->source])->in;
    }
  });
  return argument.out;
}
unsigned Ballot(unsigned mask, bool predicate);

}  // namespace promptcache::gpu::emu

#include "emulator_builtins.h"
