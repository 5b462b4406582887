// In place of cuda_device.cc where there is no toolkit.
#include "absl/strings/str_cat.h"
#include "cuda/runtime/gpus.h"

namespace promptcache::gpu {

GpuSurvey FindGpus() {
  return {.none = "no GPU: this program was built without CUDA"};
}

absl::StatusOr<std::unique_ptr<Device>> OpenGpu(const GpuSurvey& survey,
                                                const std::string&) {
  return absl::NotFoundError(survey.ToString());
}

}  // namespace promptcache::gpu
