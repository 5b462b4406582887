#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace promptcache::gpu {

// RMSNorm: out = x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm:
// out = (x - mean) / sqrt(variance + epsilon) * weight + bias. Row by row.
struct NormParams {
  const float* x = nullptr;  // [rows of x][dim], dense
  // [num_rows]: which row of x each row is of; null: row i is of row i.
  const int32_t* row_index = nullptr;
  const float* weight = nullptr;  // [dim]
  const float* bias = nullptr;    // [dim]; LayerNorm, may be null
  bool layer_norm = false;
  float epsilon = 0;
  int32_t num_rows = 0;
  int32_t dim = 0;
  // Any of these, each [num_rows][dim]; null: not wanted.
  uint16_t* out_bf16 = nullptr;
  float* out = nullptr;     // may be x
  float* add_to = nullptr;  // += the result: the residual of a norm after
};

cudaError_t LaunchNorm(const NormParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
