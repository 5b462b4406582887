#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/runtime/shared_segment.h"

// CUDA's own types, so that this header needs no toolkit: cudaStream_t is
// CUstream_st*, cudaEvent_t is CUevent_st*.
struct CUstream_st;
struct CUevent_st;

namespace promptcache::gpu {

class Device;

enum class DeviceKind { kCpu, kCuda };

struct DeviceInfo {
  DeviceKind kind = DeviceKind::kCpu;
  // Of this process's CUDA runtime. Another process may count differently:
  // only the UUID is ever told to anybody.
  int ordinal = 0;
  std::string uuid;  // "GPU-xxxxxxxx-xxxx-…" as nvidia-smi prints it; "CPU"
  std::string name;
  int compute_capability = 0;  // 90: sm_90; 0: a CPU
  int num_multiprocessors = 0;
  uint64_t total_bytes = 0;  // of its memory; 0: not told
  int driver_version = 0;    // 13000: CUDA 13.0; 0: none
  bool vmm_fds = false;      // allocations can be exported as descriptors
  std::string ToString() const;
};

enum class CopyKind { kToDevice, kToHost, kOnDevice };

// Rows of `width` bytes, `from_pitch` and `to_pitch` bytes apart.
struct Copy2D {
  void* to = nullptr;
  size_t to_pitch = 0;
  const void* from = nullptr;
  size_t from_pitch = 0;
  size_t width = 0;
  size_t height = 0;
};

// A point in a stream's work. Thread-compatible.
class Event {
 public:
  virtual ~Event() = default;
  virtual absl::Status Synchronize() = 0;
  virtual absl::StatusOr<bool> Done() = 0;
  // Since `earlier` was passed. REQUIRES: both made with timing, both done.
  virtual absl::StatusOr<float> MillisecondsSince(const Event& earlier) = 0;
  virtual CUevent_st* native() const = 0;  // null on the CPU
};

// Work in order. Nothing here waits for the device but Synchronize; memory must
// stay as it is until the work is done. On the CPU everything happens at once.
// Thread-compatible; must not outlive its device.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual absl::Status Copy(void* to, const void* from, size_t num_bytes,
                            CopyKind kind) = 0;
  virtual absl::Status Copy(const Copy2D& copy, CopyKind kind) = 0;
  virtual absl::Status Zero(void* at, size_t num_bytes) = 0;
  virtual absl::Status Zero(void* at, size_t pitch, size_t width,
                            size_t height) = 0;
  virtual absl::Status Record(Event* event) = 0;
  // What is queued from now on comes after `event`.
  virtual absl::Status Wait(const Event& event) = 0;
  virtual absl::Status Synchronize() = 0;
  // False: work is queued or running.
  virtual absl::StatusOr<bool> Idle() = 0;
  virtual CUstream_st* native() const = 0;  // null on the CPU
};

enum class StreamPriority { kNormal, kHigh };

// Memory that goes back to its device. Move-only; empty when
// default-constructed. Must not outlive the device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    if (this != &other) {
      Reset();
      device_ = std::exchange(other.device_, nullptr);
      use_ = other.use_;
      data_ = std::exchange(other.data_, nullptr);
      num_bytes_ = std::exchange(other.num_bytes_, 0);
    }
    return *this;
  }
  ~DeviceMemory() { Reset(); }

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  // Everything that is queued and uses it must be done.
  void Reset();

 protected:
  friend class Device;
  enum class Use { kDevice, kPinnedHost, kRegistered };
  DeviceMemory(Device* device, Use use, void* data, size_t num_bytes)
      : device_(device),
        use_(use),
        data_(static_cast<std::byte*>(data)),
        num_bytes_(num_bytes) {}

 private:
  Device* device_ = nullptr;
  Use use_ = Use::kDevice;
  std::byte* data_ = nullptr;
  size_t num_bytes_ = 0;
};
using DeviceBuffer = DeviceMemory;  // on the device, aligned to 256 bytes
using PinnedBuffer = DeviceMemory;  // on the host, copies run beside the CPU
using Pinning = DeviceMemory;       // of somebody else's host memory

// Where memory lies and work runs: a GPU, or the CPU behind the same words.
// Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  bool is_cuda() const { return info().kind == DeviceKind::kCuda; }

  // Makes it the calling thread's current device. Every method here does so
  // itself; whoever launches kernels calls it once per thread.
  virtual absl::Status MakeCurrent() const = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream(
      StreamPriority priority = StreamPriority::kNormal) = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> NewEvent(
      bool timing = false) = 0;

  // ResourceExhausted names the call, what was asked for and what is free.
  absl::StatusOr<DeviceBuffer> Allocate(size_t num_bytes);
  absl::StatusOr<PinnedBuffer> AllocatePinned(size_t num_bytes);
  // Pins memory that is there already (cudaHostRegister), so that copies from
  // and to it are asynchronous. It must outlive the Pinning. `read_only`: it
  // is mapped without write permission.
  absl::StatusOr<Pinning> Pin(void* base, size_t num_bytes, bool read_only);

  // Memory that other processes can map: see shared_segment.h.
  // InvalidArgument: a kind or a size that this device cannot export.
  virtual absl::StatusOr<std::unique_ptr<SharedSegment>> NewSegment(
      const char* name, uint64_t num_bytes, HandleKind kind) = 0;
  virtual bool CanImport(HandleKind kind) const = 0;
  virtual absl::StatusOr<std::unique_ptr<ImportedSegment>> Import(
      SegmentHandle handle) = 0;

 private:
  friend class DeviceMemory;
  virtual absl::StatusOr<void*> AllocateRaw(DeviceMemory::Use use,
                                            size_t num_bytes) = 0;
  virtual absl::Status PinRaw(void* base, size_t num_bytes, bool read_only) = 0;
  virtual absl::Status FreeRaw(DeviceMemory::Use use, void* data) = 0;

 protected:
  using MemoryUse = DeviceMemory::Use;
};

// The CPU: streams do everything at once, memory is ordinary memory, segments
// are memfds.
std::unique_ptr<Device> NewHostDevice();

}  // namespace promptcache::gpu
