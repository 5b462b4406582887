#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/kv_memory.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// How a model runs, on whatever device.
struct ComputeOptions {
  Numerics numerics = Numerics::kExact;
  uint32_t num_threads = 0;      // of the CPU; 0: one for each core
  std::string kernels = "auto";  // of the CPU
  bool batch_invariant = false;  // of a GPU (cuda_backend.h); a CPU always is
  // Called with 0..1 while weights are loaded; may be empty.
  std::function<void(double)> progress;
};

// Where a program's models run: a GPU or the CPU, chosen once, in main.
// Thread-compatible. Must outlive the backends that it made.
class ComputeDevice {
 public:
  // `name`: "auto" (the first GPU where there is one that can be used, else
  // the CPU), "cpu", "cuda" (the first GPU) or a GPU's UUID. NotFound, with
  // what was found instead, when such a GPU is not there or the program was
  // built without CUDA; InvalidArgument for anything else.
  static absl::StatusOr<std::unique_ptr<ComputeDevice>> Open(
      const std::string& name);

  bool is_gpu() const { return gpu_ != nullptr; }
  gpu::Device* gpu() const { return gpu_.get(); }  // null: the CPU
  // "CPU", with why where this build has no kernels, or the GPU's name.
  const std::string& description() const { return description_; }
  // Where pages of its backends lie.
  KvMemory::Options memory() const;

  // The CPU's in place of the GPU's when `auto` chose a GPU that cannot run the
  // model: a WARNING says why, and this device is the CPU from then on.
  absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(
      const ModelFile& file, const ComputeOptions& options);

 private:
  ComputeDevice() = default;

  std::unique_ptr<gpu::Device> gpu_;
  bool may_fall_back_ = false;
  std::string description_;
};

}  // namespace promptcache::worker
