#include "inference_worker/engine/cpu_weights.h"

#include <utility>

#include "common/status_macros.h"
#include "inference_worker/engine/weight_loader_inl.h"

namespace promptcache::worker {

absl::StatusOr<CpuWeights> LoadCpuWeights(
    const ModelFile& file, bool fast, cpu::Kernels& kernels,
    const std::function<void(double)>& progress) {
  bool quantized = false;
  const WeightLoader<CpuMatrix>::MakeMatrix pack =
      [&](std::span<const TensorView> parts) -> absl::StatusOr<CpuMatrix> {
    CpuMatrix matrix;
    PC_RETURN_IF_ERROR(matrix.Append(parts, fast, kernels));
    quantized = quantized || matrix.quantized();
    return matrix;
  };
  PC_ASSIGN_OR_RETURN(ModelWeights<CpuMatrix> weights,
                      WeightLoader<CpuMatrix>(file, pack, progress).Load());
  return CpuWeights{{std::move(weights)}, quantized};
}

}  // namespace promptcache::worker
