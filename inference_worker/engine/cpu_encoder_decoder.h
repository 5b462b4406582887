#pragma once

#include <cstdint>
#include <memory>

#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/cpu_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// The forward pass of T5 on the CPU. A pass first runs its encoder rows, each
// segment by itself, writes the keys and values that the decoder's attention
// to them reads, then runs its decoder rows: these may see what the same pass
// has encoded. REQUIRES: CheckConfig(config), config.is_encoder_decoder(), and
// the weights of that model for these kernels.
std::unique_ptr<Backend> CreateCpuEncoderDecoder(
    const ModelConfig& config, uint32_t page_tokens,
    std::unique_ptr<cpu::Kernels> kernels, CpuWeights weights);

}  // namespace promptcache::worker
