#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"

namespace promptcache::gpu {

// The oldest GPU that the kernels are compiled for.
inline constexpr int kMinComputeCapability = 80;

// "13.0" of 13000, as CUDA numbers its versions.
std::string CudaVersion(int version);

// What a look for GPUs found, for logs and for choosing.
struct GpuSurvey {
  std::vector<DeviceInfo> gpus;  // those that can be used
  // Those that cannot, and why not (MIG, too old, no answer).
  std::vector<std::string> refused;
  // Why there is nothing at all: built without CUDA, no driver, none visible.
  std::string none;
  // `none` is something to put right (a driver that is too old, an error of
  // CUDA), not how machines without a GPU are.
  bool fault = false;
  // "2 GPUs: GPU-… NVIDIA H200, sm_90, 139.8 GiB; …" or why there is none.
  std::string ToString() const;
  // That no GPU is used, why, and what is done `instead`: a line of INFO, a
  // WARNING where there is a fault or a GPU was refused. REQUIRES: gpus.empty()
  void LogNoGpu(std::string_view instead) const;
};

// Never fails, starts on machines without a driver. The first call initialises
// CUDA in this process: not before a fork.
GpuSurvey FindGpus();
// `uuid` empty: the first one. NotFound names what was found instead.
absl::StatusOr<std::unique_ptr<Device>> OpenGpu(const GpuSurvey& survey,
                                                const std::string& uuid);

}  // namespace promptcache::gpu
