// In place of gpu_backend.cc where no kernels were compiled.
#include "inference_worker/engine/gpu_backend.h"

namespace promptcache::worker {

const char* WhyNoGpuKernels() {
  return "this program was built without nvcc: it has no GPU kernels";
}

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(
    const ModelFile&, gpu::Device&, const ComputeOptions&) {
  return absl::UnimplementedError(WhyNoGpuKernels());
}

KvMemory::SumPages GpuPageSums() { return {}; }

}  // namespace promptcache::worker
