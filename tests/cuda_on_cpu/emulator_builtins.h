#pragma once

// CUDA C++'s built-in variables and functions, as far as kernels use them.
// Included by device_emulator.h alone.

#include <algorithm>
#include <atomic>

#define threadIdx (::promptcache::gpu::emu::current.thread)
#define blockIdx (::promptcache::gpu::emu::current.block)
#define blockDim (::promptcache::gpu::emu::current.block_size)
#define gridDim (::promptcache::gpu::emu::current.grid_size)

// NOLINTBEGIN(readability-identifier-naming,bugprone-reserved-identifier)
using std::max;
using std::min;
inline constexpr int warpSize = 32;

inline void __syncthreads() { promptcache::gpu::emu::BlockBarrier(); }
inline int __syncthreads_count(int p) {
  using promptcache::gpu::emu::Reduction;
  return promptcache::gpu::emu::BlockReduce(Reduction::kCount, p != 0);
}
inline int __syncthreads_and(int p) {
  using promptcache::gpu::emu::Reduction;
  return promptcache::gpu::emu::BlockReduce(Reduction::kAnd, p != 0);
}
inline int __syncthreads_or(int p) {
  using promptcache::gpu::emu::Reduction;
  return promptcache::gpu::emu::BlockReduce(Reduction::kOr, p != 0);
}
inline void __syncwarp(unsigned mask = ~0u) {
  char nothing;
  promptcache::gpu::emu::WarpCollective(mask, &nothing,
                                        [](void**, unsigned) {});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const auto lane = static_cast<int>(promptcache::gpu::emu::Lane());
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return promptcache::gpu::emu::Shuffle(mask, value,
                                        static_cast<uint32_t>(from));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const auto lane = static_cast<int>(promptcache::gpu::emu::Lane());
  const int from = lane ^ bits;
  return promptcache::gpu::emu::Shuffle(
      mask, value,
      static_cast<uint32_t>(from / width > lane / width ? lane : from));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const auto lane = static_cast<int>(promptcache::gpu::emu::Lane());
  const int from = lane + static_cast<int>(delta);
  const bool inside = (lane & (width - 1)) + static_cast<int>(delta) < width;
  return promptcache::gpu::emu::Shuffle(
      mask, value, static_cast<uint32_t>(inside ? from : lane));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const auto lane = static_cast<int>(promptcache::gpu::emu::Lane());
  const int from = lane - static_cast<int>(delta);
  const bool inside = (lane & (width - 1)) >= static_cast<int>(delta);
  return promptcache::gpu::emu::Shuffle(
      mask, value, static_cast<uint32_t>(inside ? from : lane));
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  return promptcache::gpu::emu::Ballot(mask, p != 0);
}
inline int __any_sync(unsigned mask, int p) {
  return promptcache::gpu::emu::Ballot(mask, p != 0) != 0;
}
inline int __all_sync(unsigned mask, int p) {
  return promptcache::gpu::emu::Ballot(mask, p == 0) == 0;
}

inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T atomicAdd(T* p, T value) {
  return std::atomic_ref<T>(*p).fetch_add(value);
}
template <class T>
T atomicExch(T* p, T value) {
  return std::atomic_ref<T>(*p).exchange(value);
}
template <class T>
T atomicCAS(T* p, T compare, T value) {
  std::atomic_ref<T>(*p).compare_exchange_strong(compare, value);
  return compare;
}
template <class T>
T atomicMax(T* p, T value) {
  std::atomic_ref<T> reference(*p);
  T old = reference.load();
  while (old < value && !reference.compare_exchange_weak(old, value)) {
  }
  return old;
}
template <class T>
T atomicMin(T* p, T value) {
  std::atomic_ref<T> reference(*p);
  T old = reference.load();
  while (value < old && !reference.compare_exchange_weak(old, value)) {
  }
  return old;
}

inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline int __float_as_int(float value) {
  return static_cast<int>(__float_as_uint(value));
}
inline float __int_as_float(int bits) {
  return __uint_as_float(static_cast<unsigned>(bits));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}
// NOLINTEND(readability-identifier-naming,bugprone-reserved-identifier)
