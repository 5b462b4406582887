#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace promptcache::gpu {

// x[row][i] += bias[i].
struct AddBiasParams {
  float* x = nullptr;           // [num_rows][dim]
  const float* bias = nullptr;  // [dim]
  int32_t num_rows = 0;
  int32_t dim = 0;
};

cudaError_t LaunchAddBias(const AddBiasParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
