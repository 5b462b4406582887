#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_matrix.h"
#include "inference_worker/engine/model_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

using CpuNorm = NormWeights;
using CpuProjection = Projection<CpuMatrix>;
using CpuLayerWeights = LayerWeights<CpuMatrix>;
using CpuCrossWeights = CrossWeights<CpuMatrix>;

// A model's weights packed for one set of kernels.
struct CpuWeights : ModelWeights<CpuMatrix> {
  bool quantized = false;  // any matrix stays so
};

// Packs everything on all threads of `kernels`: with `fast` the matrices that
// can be stay quantised, the others are rounded to bf16. `progress` (may be
// empty) is called on this thread with 0..1. InvalidArgument names a tensor
// whose shape is not what the config says.
absl::StatusOr<CpuWeights> LoadCpuWeights(
    const ModelFile& file, bool fast, cpu::Kernels& kernels,
    const std::function<void(double)>& progress);

}  // namespace promptcache::worker
