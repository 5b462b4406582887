#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

struct CpuBackendOptions {
  uint32_t num_threads = 0;      // 0: all cores of the process's affinity
  std::string kernels = "auto";  // or a name of cpu/kernels.h
  Numerics numerics = Numerics::kExact;
  uint32_t page_tokens = 16;
  // Called with 0..1 while weights are packed; may be empty.
  std::function<void(double)> progress;
};

// Loads the weights and packs them for the kernels of this processor. KV is
// bf16, sums are fp32. Does not keep the file. InvalidArgument for kernels that
// do not exist, models that they cannot run, and kFast for a file that has
// nothing for it; FailedPrecondition for kernels that this processor cannot
// run.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(
    const ModelFile& file, const CpuBackendOptions& options);

}  // namespace promptcache::worker
