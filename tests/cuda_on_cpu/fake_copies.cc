// Copies and fills of the stand-in, in stream order: bytes move when the
// stream runs, never when the call is made.
#include <sys/mman.h>

#include <cstring>

#include "fake_cuda.h"

namespace promptcache::gpu::fake {
namespace {

bool IsHost(MemoryKind kind) {
  return kind == MemoryKind::kHost || kind == MemoryKind::kRegistered;
}

// Device memory that holds all of [p, p + bytes), adjacent mappings included.
bool IsDeviceMemory(const void* p, size_t bytes, int protection) {
  const auto* at = static_cast<const char*>(p);
  while (bytes > 0) {
    const auto it = FindAllocation(at, 1);
    if (it == AllAllocations().end() || IsHost(it->second.kind) ||
        (it->second.protection & protection) != protection) {
      return false;
    }
    const size_t left =
        it->first + it->second.bytes - reinterpret_cast<uintptr_t>(at);
    if (left >= bytes) return true;
    bytes -= left;
    at += left;
  }
  return true;
}

// Host memory may be any, or pinned; it may not be the device's.
bool IsHostMemory(const void* p) {
  const auto it = FindAllocation(p, 1);
  return it == AllAllocations().end() || IsHost(it->second.kind);
}

cudaError_t CheckEnds(void* to, const void* from, size_t to_bytes,
                      size_t from_bytes, cudaMemcpyKind kind) {
  std::lock_guard lock(GlobalMutex());
  const bool to_device = kind == cudaMemcpyHostToDevice ||
                         kind == cudaMemcpyDeviceToDevice ||
                         (kind == cudaMemcpyDefault && !IsHostMemory(to));
  const bool from_device = kind == cudaMemcpyDeviceToHost ||
                           kind == cudaMemcpyDeviceToDevice ||
                           (kind == cudaMemcpyDefault && !IsHostMemory(from));
  const bool good_to =
      to_device ? IsDeviceMemory(to, to_bytes, PROT_WRITE) : IsHostMemory(to);
  const bool good_from = from_device
                             ? IsDeviceMemory(from, from_bytes, PROT_READ)
                             : IsHostMemory(from);
  return good_to && good_from ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t Copy2D(void* to, size_t to_pitch, const void* from,
                   size_t from_pitch, size_t width, size_t height,
                   cudaMemcpyKind kind, cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > to_pitch || width > from_pitch) {
    return Fail(cudaErrorInvalidPitchValue);
  }
  if (const cudaError_t e = CheckEnds(to, from, to_pitch * (height - 1) + width,
                                      from_pitch * (height - 1) + width, kind);
      e != cudaSuccess) {
    return Fail(e);
  }
  return Push(stream, reinterpret_cast<const void*>(&Copy2D), [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
}

cudaError_t Fill(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  {
    std::lock_guard lock(GlobalMutex());
    const auto it = FindAllocation(to, 1);
    const bool host = it != AllAllocations().end() && IsHost(it->second.kind);
    if (!host && !IsDeviceMemory(to, bytes, PROT_WRITE)) {
      return Fail(cudaErrorInvalidValue);
    }
  }
  return Push(stream, reinterpret_cast<const void*>(&Fill),
              [=] { std::memset(to, value, bytes); });
}

// The calls without a stream return when the bytes are there.
cudaError_t Finish(cudaError_t error) {
  if (error != cudaSuccess) return error;
  return cudaStreamSynchronize(nullptr);
}

}  // namespace
}  // namespace promptcache::gpu::fake

using promptcache::gpu::fake::CheckNotCapturing;
using promptcache::gpu::fake::Copy2D;
using promptcache::gpu::fake::Fill;
using promptcache::gpu::fake::Finish;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  return Copy2D(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                              size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return Copy2D(to, to_pitch, from, from_pitch, width, height, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                       cudaMemcpyKind kind) {
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  return Finish(cudaMemcpyAsync(to, from, bytes, kind, nullptr));
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from,
                         size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  return Finish(
      Copy2D(to, to_pitch, from, from_pitch, width, height, kind, nullptr));
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes,
                            cudaStream_t stream) {
  return Fill(to, value, bytes, stream);
}
cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width,
                              size_t height, cudaStream_t stream) {
  if (width > pitch) return cudaErrorInvalidPitchValue;
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t e =
        Fill(static_cast<char*>(to) + row * pitch, value, width, stream);
    if (e != cudaSuccess) return e;
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  return Finish(Fill(to, value, bytes, nullptr));
}

}  // extern "C"
