#pragma once

// The one header that kernel sources include: CUDA under nvcc, the emulator of
// tests/cuda_on_cpu under a host compiler. Every instruction that CUDA C++ has
// no name for is wrapped here, beside its host twin; kernels contain no asm and
// no <<<>>>.

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#define PC_DYNAMIC_SHARED(name) \
  extern __shared__ __align__(1024) unsigned char name[]
#else
#include "device_emulator.h"
#define PC_DYNAMIC_SHARED(name) \
  unsigned char* const name =   \
      static_cast<unsigned char*>(::promptcache::gpu::emu::DynamicShared())
#endif

namespace promptcache::gpu {

// What a block may have of shared memory by default, and what every
// instantiation stays within (sm_86, sm_89 and sm_120 have no more).
inline constexpr size_t kDefaultSharedBytes = size_t{48} << 10;
inline constexpr size_t kMaxSharedBytes = size_t{99} << 10;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Launches `kernel` on `stream`; its error is the result, nothing is waited
// for. An empty grid is an error: launchers return before.
template <class... P, class... A>
cudaError_t Launch(void (*kernel)(P...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, A&&... args) {
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
#ifdef __CUDACC__
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(args)...);
#else
  emu::Launch(kernel, grid, block, shared_bytes, stream,
              static_cast<P>(args)...);
#endif
  return cudaGetLastError();
}

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, zeros where `valid` is false (nothing
// is read then). There after the wait for its group and a barrier.
__device__ __forceinline__ void CpAsync16(void* to, const void* from,
                                          bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CpAsyncCommit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane 8 i + r names row r of matrix i.
__device__ __forceinline__ void LoadMatrix(uint32_t (&out)[4],
                                           const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(SharedAddress(row))
               : "memory");
}
__device__ __forceinline__ void LoadMatrixTransposed(uint32_t (&out)[4],
                                                     const void* row) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
      : "r"(SharedAddress(row))
      : "memory");
}

// d += a b: m16n8k16, a row-major, b column-major, fp32 sums. The third
// argument's type says which 16-bit type the operands hold.
__device__ __forceinline__ void Mma16816(float (&d)[4], const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1,
                                         __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void Mma16816(float (&d)[4], const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x, about 2 ulp; 0 for -infinity.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
inline void CpAsync16(void* to, const void* from, bool valid) {
  emu::CpAsync(to, from, 16, valid ? 16 : 0);
}
inline void CpAsyncCommit() { emu::CpAsyncCommit(); }
template <int kPending>
inline void CpAsyncWait() {
  emu::CpAsyncWait(kPending);
}
inline void LoadMatrix(uint32_t (&out)[4], const void* row) {
  emu::LoadMatrix(out, row, /*transposed=*/false);
}
inline void LoadMatrixTransposed(uint32_t (&out)[4], const void* row) {
  emu::LoadMatrix(out, row, /*transposed=*/true);
}
inline void Mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                     uint32_t b1, __nv_bfloat16) {
  emu::Mma16816(emu::Operand::kBf16, d, a, b0, b1);
}
inline void Mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                     uint32_t b1, __half) {
  emu::Mma16816(emu::Operand::kFp16, d, a, b0, b1);
}
inline float Exp2(float x) { return std::exp2(x); }
#endif

}  // namespace promptcache::gpu
