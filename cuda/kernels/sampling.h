#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace promptcache::gpu {

// How one row's token is chosen; the same order of filters as
// inference_worker/engine/sampler.h.
struct SamplingRow {
  float temperature = 0;         // 0: the best one, lowest id of a tie
  uint32_t top_k = 0;            // 0: off
  float top_p = 1;               // 1: off
  float min_p = 0;               // 0: off
  float repetition_penalty = 1;  // 1: off
  // Ids that it applies to, each once: [first, first + num) of
  // SamplingParams::penalized.
  int32_t first_penalized = 0;
  int32_t num_penalized = 0;
  double uniform = 0;  // the draw, in [0, 1)
};

struct SamplingParams {
  // [num_rows][vocab]; the penalties are applied in place. NaN counts as a
  // logit that can never be chosen.
  float* logits = nullptr;
  const SamplingRow* rows = nullptr;   // [num_rows]
  const int32_t* penalized = nullptr;  // ids; those out of range are ignored
  int32_t* chosen = nullptr;           // [num_rows]
  int32_t num_rows = 0;
  int32_t vocab = 0;  // above 0
};

cudaError_t LaunchSampling(const SamplingParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
