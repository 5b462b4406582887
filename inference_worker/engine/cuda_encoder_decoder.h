#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/cuda_backend.h"
#include "inference_worker/engine/cuda_layers.h"
#include "inference_worker/engine/cuda_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// T5 on a GPU; what cpu_encoder_decoder.h is on the CPU. For CreateCudaBackend,
// which has checked the config.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaEncoderDecoder(
    const ModelConfig& config, const CudaBackendOptions& options,
    std::unique_ptr<CudaLayers> layers, CudaWeights weights);

}  // namespace promptcache::worker
