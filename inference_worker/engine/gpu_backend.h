#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/compute_device.h"
#include "inference_worker/engine/kv_memory.h"
#include "inference_worker/model/model_file.h"

// What compute_device.cc needs of a build's GPU kernels. CMake links
// gpu_backend.cc where there are any, else no_gpu_backend.cc.
namespace promptcache::worker {

// Empty: there are kernels. Else why not.
const char* WhyNoGpuKernels();

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(
    const ModelFile& file, gpu::Device& device, const ComputeOptions& options);

// For KvMemory::Options::sum_pages; empty without kernels.
KvMemory::SumPages GpuPageSums();

}  // namespace promptcache::worker
