// Devices, errors, attributes of the stand-in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulator_engine.h"
#include "fake_cuda.h"

namespace promptcache::gpu::fake {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

struct Name {
  cudaError_t error;
  const char* name;
};
constexpr Name kNames[] = {
    {cudaSuccess, "cudaSuccess"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
    {cudaErrorNoDevice, "cudaErrorNoDevice"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
    {cudaErrorNotReady, "cudaErrorNotReady"},
    {cudaErrorNotSupported, "cudaErrorNotSupported"},
    {cudaErrorHostMemoryAlreadyRegistered,
     "cudaErrorHostMemoryAlreadyRegistered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
    {cudaErrorIllegalState, "cudaErrorIllegalState"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue"},
    {cudaErrorGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure"},
};

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> numbers;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find(',', begin);
    if (end == std::string::npos) end = text.size();
    numbers.push_back(std::atoi(text.substr(begin, end - begin).c_str()));
    begin = end + 1;
  }
  return numbers;
}

bool IsMig() {
  const char* mig = std::getenv("PC_EMU_MIG");
  return mig != nullptr && std::strcmp(mig, "1") == 0;
}

void FillProperties(int ordinal, cudaDeviceProp* p) {
  *p = {};
  const int physical = GetDevices().physical[static_cast<size_t>(ordinal)];
  std::snprintf(p->name, sizeof p->name, "Emulated GPU %d%s", physical,
                IsMig() ? " MIG 1g.10gb" : "");
  p->uuid = UuidOf(physical);
  p->totalGlobalMem = DeviceBytes();
  p->sharedMemPerBlock = size_t{48} << 10;
  p->sharedMemPerBlockOptin = size_t{99} << 10;
  p->sharedMemPerMultiprocessor = size_t{100} << 10;
  p->regsPerBlock = 65536;
  p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 1536;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 8;
  p->minor = 0;
  p->multiProcessorCount = 4;
  p->unifiedAddressing = 1;
  p->asyncEngineCount = 2;
  p->concurrentKernels = 1;
  p->canMapHostMemory = 1;
  p->pciBusID = physical + 1;
  p->l2CacheSize = 4 << 20;
  p->hostRegisterSupported = 1;
}

}  // namespace

std::mutex& GlobalMutex() {
  static auto* const kMutex = new std::mutex;
  return *kMutex;
}

cudaError_t Fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t TakeLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const Devices& GetDevices() {
  static const Devices devices = [] {
    Devices found;
    const char* text = std::getenv("PC_EMU_DEVICES");
    if (text == nullptr) text = "0";
    if (std::strcmp(text, "none") == 0) {
      found = {.driver = false, .driver_version = 0};
    } else if (std::strcmp(text, "old") == 0) {
      found = {.driver = false, .driver_version = 11040};
    } else {
      found.physical = Numbers(text);
    }
    return found;
  }();
  return devices;
}

cudaError_t CheckDevice(int ordinal) {
  const Devices& devices = GetDevices();
  if (!devices.driver) return cudaErrorInsufficientDriver;
  if (devices.physical.empty()) return cudaErrorNoDevice;
  const auto count = static_cast<int>(devices.physical.size());
  return ordinal >= 0 && ordinal < count ? cudaSuccess : cudaErrorInvalidDevice;
}

int CurrentDevice() { return current_device; }

size_t DeviceBytes() {
  static const size_t bytes = [] {
    const char* mib = std::getenv("PC_EMU_DEVICE_MIB");
    return static_cast<size_t>(mib == nullptr ? 4096 : std::atoll(mib)) << 20;
  }();
  return bytes;
}

cudaUUID_t UuidOf(int physical) {
  cudaUUID_t uuid;
  std::memcpy(uuid.bytes, "cuda-on-cpu-gpu", 15);
  uuid.bytes[15] = static_cast<char>(physical);
  return uuid;
}

}  // namespace promptcache::gpu::fake

using promptcache::gpu::fake::CheckDevice;
using promptcache::gpu::fake::CurrentDevice;
using promptcache::gpu::fake::Fail;
using promptcache::gpu::fake::GetDevices;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  // Left untouched on an error, as the runtime does.
  if (const cudaError_t e = CheckDevice(0); e != cudaSuccess) return Fail(e);
  *count = static_cast<int>(GetDevices().physical.size());
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t e = CheckDevice(device); e != cudaSuccess) {
    return Fail(e);
  }
  promptcache::gpu::fake::current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t e = CheckDevice(0); e != cudaSuccess) return Fail(e);
  *device = CurrentDevice();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t e = CheckDevice(device); e != cudaSuccess) {
    return Fail(e);
  }
  promptcache::gpu::fake::FillProperties(device, properties);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device) {
  cudaDeviceProp p;
  if (const cudaError_t e = cudaGetDeviceProperties(&p, device);
      e != cudaSuccess) {
    return e;
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrIpcEventSupport:
      *value = 1;
      break;
    case cudaDevAttrHostRegisterReadOnlySupported:
      *value = 0;
      break;
    default:
      return Fail(cudaErrorNotSupported);  // tell the stand-in's author
  }
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = GetDevices().driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = promptcache::gpu::fake::kCudaVersion;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return Fail(CheckDevice(device));
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return promptcache::gpu::fake::TakeLastError();
}
cudaError_t cudaPeekAtLastError() { return promptcache::gpu::fake::last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  for (const auto& known : promptcache::gpu::fake::kNames) {
    if (known.error == error) return known.name;
  }
  return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}

}  // extern "C"
