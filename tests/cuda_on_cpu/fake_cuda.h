#pragma once

// What the parts of the stand-in for the CUDA runtime share: one process's
// devices, allocations and streams. The functions that programs call are
// defined against the toolkit's own prototypes, so a wrong signature does not
// compile.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace promptcache::gpu::fake {

// Guards everything below. Never held while an operation of a stream runs.
std::mutex& GlobalMutex();

// Keeps `error` for cudaGetLastError, and returns it.
cudaError_t Fail(cudaError_t error);
cudaError_t TakeLastError();

// --- devices -------------------------------------------------------------

constexpr int kCudaVersion = 13000;

// PC_EMU_DEVICES lists the physical GPUs that this process sees, in its order:
// "0" when it is not set, "0,1", "1", "" (no GPU), "none" (no driver) or "old"
// (a driver that is too old).
struct Devices {
  bool driver = true;  // it can be used
  int driver_version = kCudaVersion;
  std::vector<int> physical;
};
const Devices& GetDevices();
// 0, or the ordinal's error (no driver, no device, out of range).
cudaError_t CheckDevice(int ordinal);
int CurrentDevice();
size_t DeviceBytes();  // of each device; PC_EMU_DEVICE_MIB, 4096 by default
cudaUUID_t UuidOf(int physical);

// --- memory --------------------------------------------------------------

enum class MemoryKind { kDevice, kHost, kRegistered, kIpc, kMapped };

struct Allocation {
  size_t bytes = 0;
  size_t mapped_bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;            // ordinal
  uint64_t file_offset = 0;  // kDevice: in the process's memory file
  int protection = 0;        // PROT_... that kernels and copies have
  int opened = 0;            // kIpc: how often
};
using Allocations = std::map<uintptr_t, Allocation>;

// REQUIRES for all of these: GlobalMutex() held.
Allocations& AllAllocations();
// The one that holds [p, p + bytes), else end().
Allocations::iterator FindAllocation(const void* p, size_t bytes);
// Accounts for device memory; false when it does not fit.
bool TakeDeviceBytes(int device, size_t bytes);
void GiveDeviceBytes(int device, size_t bytes);

// Maps, populates and poisons: fresh memory is NaN in every float format.
void* MapPoisoned(int fd, uint64_t offset, size_t bytes);

// With PC_EMU_GUARD=1 device memory can be read and written only inside one of
// these: a kernel or copy that runs. Host code that touches it faults.
class DeviceSection {
 public:
  DeviceSection();
  ~DeviceSection();
  DeviceSection(const DeviceSection&) = delete;
  DeviceSection& operator=(const DeviceSection&) = delete;
};
// What an allocation is to be mapped with now. REQUIRES: mutex held.
int ProtectionNow(const Allocation& allocation);

// --- streams -------------------------------------------------------------

// What a stream records instead of running it.
struct GraphOperation {
  const void* what = nullptr;  // tells operations apart in updates
  std::function<void()> run;
};
struct Capture {
  std::vector<GraphOperation> operations;
  bool relaxed = false;
  bool broken = false;
};

struct Stream {
  int device = 0;
  bool blocking = true;  // orders with the null stream
  std::deque<std::function<void()>> queue;
  uint64_t queued = 0, done = 0;
  bool running = false;
  std::shared_ptr<Capture> capture;
};

// Runs (or waits for) the stream's operations up to number `target`.
void RunUntil(const std::shared_ptr<Stream>& stream, uint64_t target);
// All streams of this process.
void DrainAll();
// Queues an operation; `what` names it in graphs.
cudaError_t Push(cudaStream_t stream, const void* what,
                 std::function<void()> operation);
// An error when this thread may not do what would break a capture.
cudaError_t CheckNotCapturing();

}  // namespace promptcache::gpu::fake
