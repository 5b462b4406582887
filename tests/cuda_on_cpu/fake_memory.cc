// Device and pinned memory, registration, copies and IPC memory handles of the
// stand-in.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulator_engine.h"
#include "fake_cuda.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PC_EMU_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define PC_EMU_ASAN 1
#endif
#ifdef PC_EMU_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

namespace promptcache::gpu::fake {
namespace {

constexpr size_t kPageBytes = 4096;
// Behind each allocation, for the address sanitizer.
constexpr size_t kRedZoneBytes = 64;
constexpr uint64_t kIpcMagic = 0x6e6f2d6164756350;

// All cudaMalloc memory of a process lies in one sparse file, so that every
// allocation can be opened by another process and costs no descriptor.
struct MemoryFile {
  int fd = -1;
  pid_t owner = 0;
  uint64_t used = 0;
  // Freed ranges by bytes. Used again first, and so the handle of a later
  // allocation may equal a freed one's, as it may with the driver.
  std::multimap<size_t, std::pair<void*, uint64_t>> free_ranges;
};

MemoryFile& TheFile() {
  static MemoryFile file;
  if (file.owner != getpid()) {
    file = {};
    file.owner = getpid();
    file.fd = memfd_create("promptcache-fake-device", MFD_CLOEXEC);
    if (file.fd < 0 || ftruncate(file.fd, off_t{1} << 46) != 0) {
      emu::Die("no memory file for the emulated device");
    }
  }
  return file;
}

struct IpcHandle {
  uint64_t magic;
  int32_t pid, fd, physical, unused;
  uint64_t offset, bytes, mapped_bytes;
};
static_assert(sizeof(IpcHandle) <= sizeof(cudaIpcMemHandle_t::reserved));

size_t DeviceBytesUsed(int device, int64_t change) {
  static std::map<int, size_t> used;
  used[device] =
      static_cast<size_t>(static_cast<int64_t>(used[device]) + change);
  return used[device];
}

cudaError_t NewHost(void** out, size_t bytes) {
  const size_t mapped = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  void* const p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED) return Fail(cudaErrorMemoryAllocation);
  std::lock_guard lock(GlobalMutex());
  AllAllocations()[reinterpret_cast<uintptr_t>(p)] = {
      .bytes = bytes,
      .mapped_bytes = mapped,
      .kind = MemoryKind::kHost,
      .protection = PROT_READ | PROT_WRITE};
  *out = p;
  return cudaSuccess;
}

// A range of the file, poisoned. REQUIRES: mutex held.
void* TakeRange(size_t mapped, uint64_t* offset) {
  MemoryFile& file = TheFile();
  const auto found = file.free_ranges.find(mapped);
  if (found == file.free_ranges.end()) {
    *offset = file.used;
    file.used += mapped;
    return MapPoisoned(file.fd, *offset, mapped);
  }
  const auto [address, old_offset] = found->second;
  file.free_ranges.erase(found);
  *offset = old_offset;
  mprotect(address, mapped, PROT_READ | PROT_WRITE);
  madvise(address, mapped, MADV_POPULATE_WRITE);
  std::memset(address, 0xff, mapped);
  return address;
}

cudaError_t NewDevice(void** out, size_t bytes) {
  std::lock_guard lock(GlobalMutex());
  const int device = CurrentDevice();
  const size_t mapped =
      (bytes + kRedZoneBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (!TakeDeviceBytes(device, mapped)) {
    return Fail(cudaErrorMemoryAllocation);
  }
  Allocation allocation = {.bytes = bytes,
                           .mapped_bytes = mapped,
                           .kind = MemoryKind::kDevice,
                           .device = device,
                           .protection = PROT_READ | PROT_WRITE};
  void* const p = TakeRange(mapped, &allocation.file_offset);
  if (p == nullptr) {
    GiveDeviceBytes(device, mapped);
    return Fail(cudaErrorMemoryAllocation);
  }
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(p) + bytes, mapped - bytes);
  AllAllocations()[reinterpret_cast<uintptr_t>(p)] = allocation;
  if (ProtectionNow(allocation) != allocation.protection) {
    mprotect(p, mapped, ProtectionNow(allocation));
  }
  *out = p;
  return cudaSuccess;
}

cudaError_t Free(void* p, MemoryKind kind) {
  if (p == nullptr) return cudaSuccess;
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  {
    std::lock_guard lock(GlobalMutex());
    const auto it = AllAllocations().find(reinterpret_cast<uintptr_t>(p));
    if (it == AllAllocations().end() || it->second.kind != kind) {
      return Fail(cudaErrorInvalidValue);
    }
  }
  DrainAll();
  std::lock_guard lock(GlobalMutex());
  const auto it = AllAllocations().find(reinterpret_cast<uintptr_t>(p));
  const Allocation allocation = it->second;
  AllAllocations().erase(it);
  if (kind != MemoryKind::kDevice) {
    munmap(p, allocation.mapped_bytes);
    return cudaSuccess;
  }
  ASAN_UNPOISON_MEMORY_REGION(p, allocation.mapped_bytes);
  GiveDeviceBytes(allocation.device, allocation.mapped_bytes);
  MemoryFile& file = TheFile();
  // Importers that still read it see zeros now: it was freed under them.
  fallocate(file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(allocation.file_offset),
            static_cast<off_t>(allocation.mapped_bytes));
  mprotect(p, allocation.mapped_bytes, PROT_NONE);
  file.free_ranges.emplace(allocation.mapped_bytes,
                           std::pair(p, allocation.file_offset));
  return cudaSuccess;
}

// Pinning writes to the page tables' entries: a read-only mapping is refused.
bool IsWritable(const void* p, size_t bytes) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  auto at = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = at + bytes;
  char line[512];
  while (at < end && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long first;
    unsigned long last;
    char mode[5];
    if (std::sscanf(line, "%lx-%lx %4s", &first, &last, mode) != 3) continue;
    if (at < first || at >= last) continue;
    if (mode[0] != 'r' || mode[1] != 'w') break;
    at = last;
  }
  std::fclose(maps);
  return at >= end;
}

}  // namespace

Allocations& AllAllocations() {
  static auto* const kAllocations = new Allocations;
  return *kAllocations;
}

Allocations::iterator FindAllocation(const void* p, size_t bytes) {
  Allocations& all = AllAllocations();
  const auto address = reinterpret_cast<uintptr_t>(p);
  auto it = all.upper_bound(address);
  if (it == all.begin()) return all.end();
  --it;
  return address + bytes <= it->first + it->second.bytes ? it : all.end();
}

bool TakeDeviceBytes(int device, size_t bytes) {
  if (DeviceBytesUsed(device, 0) + bytes > DeviceBytes()) return false;
  DeviceBytesUsed(device, static_cast<int64_t>(bytes));
  return true;
}

void GiveDeviceBytes(int device, size_t bytes) {
  DeviceBytesUsed(device, -static_cast<int64_t>(bytes));
}

void* MapPoisoned(int fd, uint64_t offset, size_t bytes) {
  void* const p =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
           fd, static_cast<off_t>(offset));
  if (p == MAP_FAILED) return nullptr;
  std::memset(p, 0xff, bytes);
  return p;
}

}  // namespace promptcache::gpu::fake

using promptcache::gpu::fake::AllAllocations;
using promptcache::gpu::fake::CheckDevice;
using promptcache::gpu::fake::CheckNotCapturing;
using promptcache::gpu::fake::CurrentDevice;
using promptcache::gpu::fake::Fail;
using promptcache::gpu::fake::FindAllocation;
using promptcache::gpu::fake::GlobalMutex;
using promptcache::gpu::fake::MemoryKind;

extern "C" {

cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  if (const cudaError_t e = CheckNotCapturing(); e != cudaSuccess) return e;
  if (bytes == 0) {
    *out = nullptr;
    return cudaSuccess;
  }
  return promptcache::gpu::fake::NewDevice(out, bytes);
}
cudaError_t cudaFree(void* p) {
  return promptcache::gpu::fake::Free(p, MemoryKind::kDevice);
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return promptcache::gpu::fake::NewHost(out, bytes);
}
cudaError_t cudaMallocHost(void** out, size_t bytes) {
  return promptcache::gpu::fake::NewHost(out, bytes);
}
cudaError_t cudaFreeHost(void* p) {
  return promptcache::gpu::fake::Free(p, MemoryKind::kHost);
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  if (p == nullptr || bytes == 0) return Fail(cudaErrorInvalidValue);
  if ((flags & cudaHostRegisterReadOnly) != 0) {
    return Fail(cudaErrorNotSupported);
  }
  if (!promptcache::gpu::fake::IsWritable(p, bytes)) {
    return Fail(cudaErrorInvalidValue);
  }
  std::lock_guard lock(GlobalMutex());
  const auto address = reinterpret_cast<uintptr_t>(p);
  const auto next = AllAllocations().lower_bound(address);
  const bool overlaps_next =
      next != AllAllocations().end() && next->first < address + bytes;
  if (overlaps_next || FindAllocation(p, 1) != AllAllocations().end()) {
    return Fail(cudaErrorHostMemoryAlreadyRegistered);
  }
  AllAllocations()[address] = {.bytes = bytes,
                               .mapped_bytes = bytes,
                               .kind = MemoryKind::kRegistered,
                               .protection = PROT_READ | PROT_WRITE};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  promptcache::gpu::fake::DrainAll();
  std::lock_guard lock(GlobalMutex());
  const auto it = AllAllocations().find(reinterpret_cast<uintptr_t>(p));
  if (it == AllAllocations().end() ||
      it->second.kind != MemoryKind::kRegistered) {
    return Fail(cudaErrorHostMemoryNotRegistered);
  }
  AllAllocations().erase(it);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  std::lock_guard lock(GlobalMutex());
  *total_bytes = promptcache::gpu::fake::DeviceBytes();
  *free_bytes = *total_bytes -
                promptcache::gpu::fake::DeviceBytesUsed(CurrentDevice(), 0);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out,
                                     const void* p) {
  std::lock_guard lock(GlobalMutex());
  *out = {};
  const auto it = FindAllocation(p, 1);
  if (it == AllAllocations().end()) {
    out->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  const MemoryKind kind = it->second.kind;
  const bool host =
      kind == MemoryKind::kHost || kind == MemoryKind::kRegistered;
  out->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->device = it->second.device;
  out->devicePointer = const_cast<void*>(p);
  out->hostPointer = host ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* p) {
  using promptcache::gpu::fake::IpcHandle;
  std::lock_guard lock(GlobalMutex());
  const auto it = AllAllocations().find(reinterpret_cast<uintptr_t>(p));
  if (it == AllAllocations().end() || it->second.kind != MemoryKind::kDevice) {
    return Fail(cudaErrorInvalidValue);  // not the base of a cudaMalloc
  }
  const auto& allocation = it->second;
  const IpcHandle handle = {
      .magic = promptcache::gpu::fake::kIpcMagic,
      .pid = getpid(),
      .fd = promptcache::gpu::fake::TheFile().fd,
      .physical = promptcache::gpu::fake::GetDevices()
                      .physical[static_cast<size_t>(allocation.device)],
      .unused = 0,
      .offset = allocation.file_offset,
      .bytes = allocation.bytes,
      .mapped_bytes = allocation.mapped_bytes};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out->reserved, &handle, sizeof handle);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t in, unsigned) {
  using promptcache::gpu::fake::IpcHandle;
  if (const cudaError_t e = CheckDevice(CurrentDevice()); e != cudaSuccess) {
    return Fail(e);
  }
  IpcHandle handle;
  std::memcpy(&handle, in.reserved, sizeof handle);
  // The exporting process may not open its own.
  if (handle.magic != promptcache::gpu::fake::kIpcMagic ||
      handle.pid == getpid()) {
    return Fail(cudaErrorInvalidValue);
  }
  const int device = CurrentDevice();
  if (promptcache::gpu::fake::GetDevices()
          .physical[static_cast<size_t>(device)] != handle.physical) {
    return Fail(cudaErrorInvalidDevice);
  }
  std::lock_guard lock(GlobalMutex());
  static auto* const kOpen = new std::map<std::string, void*>;
  const std::string name(in.reserved, sizeof in.reserved);
  if (const auto it = kOpen->find(name); it != kOpen->end()) {
    const auto known =
        AllAllocations().find(reinterpret_cast<uintptr_t>(it->second));
    if (known != AllAllocations().end() &&
        known->second.kind == MemoryKind::kIpc) {
      ++known->second.opened;
      *out = it->second;
      return cudaSuccess;
    }
  }
  const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" +
                           std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return Fail(cudaErrorMapBufferObjectFailed);
  void* const p =
      mmap(nullptr, handle.mapped_bytes, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(handle.offset));
  close(fd);
  if (p == MAP_FAILED) return Fail(cudaErrorMapBufferObjectFailed);
  promptcache::gpu::fake::Allocation allocation = {
      .bytes = handle.bytes,
      .mapped_bytes = handle.mapped_bytes,
      .kind = MemoryKind::kIpc,
      .device = device,
      .protection = PROT_READ | PROT_WRITE,
      .opened = 1};
  AllAllocations()[reinterpret_cast<uintptr_t>(p)] = allocation;
  mprotect(p, handle.mapped_bytes,
           promptcache::gpu::fake::ProtectionNow(allocation));
  (*kOpen)[name] = p;
  *out = p;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* p) {
  {
    std::lock_guard lock(GlobalMutex());
    const auto it = AllAllocations().find(reinterpret_cast<uintptr_t>(p));
    if (it == AllAllocations().end() || it->second.kind != MemoryKind::kIpc) {
      return Fail(cudaErrorInvalidValue);
    }
    if (--it->second.opened > 0) return cudaSuccess;
  }
  return promptcache::gpu::fake::Free(p, MemoryKind::kIpc);
}

}  // extern "C"
