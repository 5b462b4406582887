// The driver's entry points of the stand-in: virtual memory whose allocations
// travel as POSIX file descriptors. Programs get them by name at run time, as
// they do from the driver.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "fake_cuda.h"

#undef cuDeviceGetUuid

namespace promptcache::gpu::fake {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;

bool Is(const char* name, const char* value) {
  const char* text = std::getenv(name);
  return text != nullptr && std::strcmp(text, value) == 0;
}

// Freed with its last reference: the handle, and each mapping.
struct Physical {
  ~Physical() {
    close(fd);
    if (own) GiveDeviceBytes(device, bytes);
  }
  int fd = -1;
  size_t bytes = 0;
  int device = 0;
  bool own = false;  // accounted here; an imported one is not
  bool exportable = false;
};
using PhysicalRef = std::shared_ptr<Physical>;

struct Mapping {
  size_t bytes;
  PhysicalRef physical;
};

struct State {
  std::map<CUmemGenericAllocationHandle, PhysicalRef> handles;
  std::map<uintptr_t, size_t> reserved;
  std::map<uintptr_t, Mapping> mapped;
  CUmemGenericAllocationHandle next_handle = 1;
};

State& TheState() {
  static auto* const kState = new State;
  return *kState;
}

CUresult GetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_SUCCESS:
      *name = "CUDA_SUCCESS";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      break;
    case CUDA_ERROR_INVALID_DEVICE:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      break;
    case CUDA_ERROR_INVALID_HANDLE:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult Init(unsigned) {
  if (!GetDevices().driver) return CUDA_ERROR_STUB_LIBRARY;
  return GetDevices().physical.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
CUresult DriverGetVersion(int* version) {
  *version = GetDevices().driver_version;
  return CUDA_SUCCESS;
}
CUresult DeviceGet(CUdevice* device, int ordinal) {
  if (CheckDevice(ordinal) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (CheckDevice(device) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = UuidOf(GetDevices().physical[static_cast<size_t>(device)]);
  return CUDA_SUCCESS;
}
CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute,
                            CUdevice device) {
  if (CheckDevice(device) != cudaSuccess) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = Is("PC_EMU_NO_VMM", "1") ? 0 : 1;
      return CUDA_SUCCESS;
    default:
      return cudaDeviceGetAttribute(value,
                                    static_cast<cudaDeviceAttr>(attribute),
                                    device) == cudaSuccess
                 ? CUDA_SUCCESS
                 : CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult MemGetAllocationGranularity(size_t* bytes,
                                     const CUmemAllocationProp* prop,
                                     CUmemAllocationGranularity_flags) {
  if (CheckDevice(prop->location.id) != cudaSuccess) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult MemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                   const CUmemAllocationProp* prop, unsigned long long flags) {
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 ||
      prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (CheckDevice(prop->location.id) != cudaSuccess) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  std::lock_guard lock(GlobalMutex());
  if (!TakeDeviceBytes(prop->location.id, bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto physical = std::make_shared<Physical>();
  physical->bytes = bytes;
  physical->device = prop->location.id;
  physical->own = true;
  physical->exportable = (prop->requestedHandleTypes &
                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  physical->fd = memfd_create("promptcache-fake-vmm", MFD_CLOEXEC);
  if (physical->fd < 0 ||
      ftruncate(physical->fd, static_cast<off_t>(bytes)) != 0) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  void* const poisoned = MapPoisoned(physical->fd, 0, bytes);
  if (poisoned == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  munmap(poisoned, bytes);
  *out = TheState().next_handle++;
  TheState().handles[*out] = std::move(physical);
  return CUDA_SUCCESS;
}

CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(GlobalMutex());
  return TheState().handles.erase(handle) == 1 ? CUDA_SUCCESS
                                               : CUDA_ERROR_INVALID_VALUE;
}

CUresult MemExport(void* out, CUmemGenericAllocationHandle handle,
                   CUmemAllocationHandleType type, unsigned long long flags) {
  std::lock_guard lock(GlobalMutex());
  const auto it = TheState().handles.find(handle);
  if (it == TheState().handles.end() || !it->second->exportable ||
      type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = fcntl(it->second->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &fd, sizeof fd);
  return CUDA_SUCCESS;
}

CUresult MemImport(CUmemGenericAllocationHandle* out, void* os_handle,
                   CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto number = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
  const int fd = fcntl(number, F_DUPFD_CLOEXEC, 0);
  struct stat status;
  if (fd < 0 || fstat(fd, &status) != 0 || status.st_size == 0) {
    if (fd >= 0) close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto physical = std::make_shared<Physical>();
  physical->fd = fd;
  physical->bytes = static_cast<size_t>(status.st_size);
  physical->device = CurrentDevice();
  std::lock_guard lock(GlobalMutex());
  *out = TheState().next_handle++;
  TheState().handles[*out] = std::move(physical);
  return CUDA_SUCCESS;
}

CUresult MemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment,
                           CUdeviceptr, unsigned long long flags) {
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 ||
      alignment > kGranularity) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* const p = mmap(nullptr, bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(GlobalMutex());
  *out = reinterpret_cast<CUdeviceptr>(p);
  TheState().reserved[reinterpret_cast<uintptr_t>(p)] = bytes;
  return CUDA_SUCCESS;
}

CUresult MemAddressFree(CUdeviceptr p, size_t bytes) {
  std::lock_guard lock(GlobalMutex());
  const auto it = TheState().reserved.find(p);
  const auto mapped = TheState().mapped.lower_bound(p);
  const bool still_mapped =
      mapped != TheState().mapped.end() && mapped->first < p + bytes;
  if (it == TheState().reserved.end() || it->second != bytes || still_mapped) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(reinterpret_cast<void*>(p), bytes);
  TheState().reserved.erase(it);
  return CUDA_SUCCESS;
}

CUresult MemMap(CUdeviceptr p, size_t bytes, size_t offset,
                CUmemGenericAllocationHandle handle, unsigned long long flags) {
  std::lock_guard lock(GlobalMutex());
  const auto it = TheState().handles.find(handle);
  auto range = TheState().reserved.upper_bound(p);
  if (it == TheState().handles.end() || range == TheState().reserved.begin() ||
      offset != 0 || flags != 0 || bytes % kGranularity != 0 ||
      bytes > it->second->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  --range;
  if (p + bytes > range->first + range->second) return CUDA_ERROR_INVALID_VALUE;
  // Present, but out of reach until access is set.
  void* const address = mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE,
                             MAP_SHARED | MAP_FIXED, it->second->fd, 0);
  if (address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  AllAllocations()[p] = {.bytes = bytes,
                         .mapped_bytes = bytes,
                         .kind = MemoryKind::kMapped,
                         .device = it->second->device,
                         .protection = PROT_NONE};
  TheState().mapped[p] = {bytes, it->second};
  return CUDA_SUCCESS;
}

CUresult MemUnmap(CUdeviceptr p, size_t bytes) {
  DrainAll();
  std::lock_guard lock(GlobalMutex());
  const auto it = TheState().mapped.find(p);
  if (it == TheState().mapped.end() || it->second.bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  AllAllocations().erase(p);
  TheState().mapped.erase(it);
  return CUDA_SUCCESS;
}

CUresult MemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc* desc,
                      size_t count) {
  if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ &&
      Is("PC_EMU_NO_READ_ONLY", "1")) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const int protection =
      desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE
          ? PROT_READ | PROT_WRITE
          : (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ
                                                          : PROT_NONE);
  std::lock_guard lock(GlobalMutex());
  uintptr_t at = p;
  while (at < p + bytes) {
    const auto it = TheState().mapped.find(at);
    if (it == TheState().mapped.end()) return CUDA_ERROR_INVALID_VALUE;
    Allocation& allocation = AllAllocations()[at];
    allocation.protection = protection;
    if (mprotect(reinterpret_cast<void*>(at), it->second.bytes,
                 ProtectionNow(allocation)) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (protection != PROT_NONE) {
      madvise(reinterpret_cast<void*>(at), it->second.bytes,
              MADV_POPULATE_READ);
    }
    at += it->second.bytes;
  }
  return CUDA_SUCCESS;
}

struct EntryPoint {
  const char* name;
  void* function;
  bool virtual_memory;
};

template <class F>
EntryPoint Entry(const char* name, F* function, bool virtual_memory = false) {
  return {name, reinterpret_cast<void*>(function), virtual_memory};
}

const std::vector<EntryPoint>& EntryPoints() {
  static const auto* const kPoints = new std::vector<EntryPoint>{
      Entry("cuInit", Init),
      Entry("cuGetErrorName", GetErrorName),
      Entry("cuGetErrorString", GetErrorName),
      Entry("cuDriverGetVersion", DriverGetVersion),
      Entry("cuDeviceGet", DeviceGet),
      Entry("cuDeviceGetUuid", DeviceGetUuid),
      Entry("cuDeviceGetUuid_v2", DeviceGetUuid),
      Entry("cuDeviceGetAttribute", DeviceGetAttribute),
      Entry("cuMemGetAllocationGranularity", MemGetAllocationGranularity, true),
      Entry("cuMemCreate", MemCreate, true),
      Entry("cuMemRelease", MemRelease, true),
      Entry("cuMemExportToShareableHandle", MemExport, true),
      Entry("cuMemImportFromShareableHandle", MemImport, true),
      Entry("cuMemAddressReserve", MemAddressReserve, true),
      Entry("cuMemAddressFree", MemAddressFree, true),
      Entry("cuMemMap", MemMap, true),
      Entry("cuMemUnmap", MemUnmap, true),
      Entry("cuMemSetAccess", MemSetAccess, true),
  };
  return *kPoints;
}

}  // namespace
}  // namespace promptcache::gpu::fake

namespace fake = promptcache::gpu::fake;

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  if (!fake::GetDevices().driver) {
    return fake::Fail(cudaErrorInsufficientDriver);
  }
  for (const auto& entry : fake::EntryPoints()) {
    if (std::strcmp(entry.name, symbol) != 0) continue;
    if (entry.virtual_memory && fake::Is("PC_EMU_NO_VMM", "1")) break;
    *function = entry.function;
    if (status != nullptr) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
  }
  *function = nullptr;
  if (status != nullptr) *status = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
