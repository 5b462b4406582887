// A block a row, its threads along the row. Numerics: fp32; the scale first,
// then the learned position.

#include "cuda/kernels/bf16.cuh"
#include "cuda/kernels/embedding.h"

namespace promptcache::gpu {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) EmbeddingKernel(EmbeddingParams p) {
  const int row = static_cast<int>(blockIdx.x);
  const uint16_t* token = p.table + static_cast<int64_t>(p.ids[row]) * p.dim;
  const uint16_t* position = nullptr;
  if (p.positions != nullptr) {
    position = p.positions + static_cast<int64_t>(p.position_rows[row]) * p.dim;
  }
  float* out = p.out + static_cast<int64_t>(row) * p.dim;
  for (int i = static_cast<int>(threadIdx.x); i < p.dim; i += kThreads) {
    float value = Bf16ToFloat(token[i]) * p.scale;
    if (position != nullptr) value += Bf16ToFloat(position[i]);
    out[i] = value;
  }
}

}  // namespace

cudaError_t LaunchEmbedding(const EmbeddingParams& params,
                            cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return Launch(EmbeddingKernel, dim3(static_cast<unsigned>(params.num_rows)),
                dim3(kThreads), 0, stream, params);
}

}  // namespace promptcache::gpu
