#include "inference_worker/engine/compute_device.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "cuda/runtime/gpus.h"
#include "glog/logging.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/gpu_backend.h"

namespace promptcache::worker {
namespace {

// Of a GPU that the model, or the machine, does not fit.
bool IsReasonForTheCpu(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
         absl::IsUnimplemented(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ComputeDevice>> ComputeDevice::Open(
    const std::string& name) {
  std::unique_ptr<ComputeDevice> device(new ComputeDevice());
  if (name == "cpu") {
    device->description_ = "CPU";
    return device;
  }
  const bool by_uuid = std::string_view(name).starts_with("GPU-");
  if (name != "auto" && name != "cuda" && !by_uuid) {
    return absl::InvalidArgumentError(absl::StrCat(
        "device \"", name, "\": use auto, cpu, cuda or a GPU's UUID"));
  }
  device->may_fall_back_ = name == "auto";
  if (*WhyNoGpuKernels() != '\0') {
    if (name != "auto") return absl::NotFoundError(WhyNoGpuKernels());
    device->description_ = absl::StrCat("CPU: ", WhyNoGpuKernels());
    return device;
  }
  const gpu::GpuSurvey survey = gpu::FindGpus();
  if (name == "auto" && survey.gpus.empty()) {
    survey.LogNoGpu("computing on the CPU");
    device->description_ = "CPU";
    return device;
  }
  PC_ASSIGN_OR_RETURN(device->gpu_,
                      gpu::OpenGpu(survey, by_uuid ? name : std::string()));
  device->description_ = device->gpu_->info().ToString();
  return device;
}

KvMemory::Options ComputeDevice::memory() const {
  if (!is_gpu()) return {};
  return {.device = gpu_.get(), .sum_pages = GpuPageSums()};
}

absl::StatusOr<std::unique_ptr<Backend>> ComputeDevice::CreateBackend(
    const ModelFile& file, const ComputeOptions& options) {
  if (is_gpu()) {
    auto backend = CreateGpuBackend(file, *gpu_, options);
    if (backend.ok() || !may_fall_back_ ||
        !IsReasonForTheCpu(backend.status())) {
      return backend;
    }
    LOG(WARNING) << "not on the GPU: " << backend.status().ToString();
    description_ = absl::StrCat("CPU: not on the GPU: ",
                                std::string(backend.status().message()));
    gpu_.reset();
  }
  return CreateCpuBackend(file, {.num_threads = options.num_threads,
                                 .kernels = options.kernels,
                                 .numerics = options.numerics,
                                 .progress = options.progress});
}

}  // namespace promptcache::worker
