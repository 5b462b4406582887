#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace promptcache::gpu {

// out[row] = table[id of the row] * scale + positions[table row of the row].
struct EmbeddingParams {
  const uint16_t* table = nullptr;  // bf16 [vocab][dim]
  const int32_t* ids = nullptr;     // [num_rows], within the table
  float scale = 1;
  const uint16_t* positions = nullptr;     // bf16 [positions][dim]; may be null
  const int32_t* position_rows = nullptr;  // [num_rows], of positions
  float* out = nullptr;                    // [num_rows][dim]
  int32_t num_rows = 0;
  int32_t dim = 0;
};

cudaError_t LaunchEmbedding(const EmbeddingParams& params, cudaStream_t stream);

}  // namespace promptcache::gpu
