// One block a row; a thread holds elements threadIdx.x + i * blockDim.x.
//
// Numerics: fp32 throughout, the mean first and then the squares of what is
// left (LayerNorm); an element's place decides who adds it, so a row's bits do
// not depend on the other rows. The block's size follows from dim alone.

#include "cuda/kernels/bf16.cuh"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/reduce.cuh"

namespace promptcache::gpu {
namespace {

constexpr int kMaxThreads = 512;
// Elements a thread takes before the block grows.
constexpr int kElementsPerThread = 4;

__global__ void __launch_bounds__(kMaxThreads) NormKernel(NormParams p) {
  __shared__ float scratch[kMaxThreads / kWarpLanes];
  const int row = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(blockDim.x);
  const int first = static_cast<int>(threadIdx.x);
  const int64_t source = p.row_index != nullptr ? p.row_index[row] : row;
  const float* x = p.x + source * p.dim;
  float mean = 0.0f;
  if (p.layer_norm) {
    float sum = 0.0f;
    for (int i = first; i < p.dim; i += step) sum += x[i];
    mean = BlockSum(sum, scratch) / static_cast<float>(p.dim);
  }
  float squares = 0.0f;
  for (int i = first; i < p.dim; i += step) {
    const float centred = x[i] - mean;
    squares += centred * centred;
  }
  squares = BlockSum(squares, scratch) / static_cast<float>(p.dim);
  const float scale = 1.0f / sqrtf(squares + p.epsilon);
  const int64_t out = static_cast<int64_t>(row) * p.dim;
  for (int i = first; i < p.dim; i += step) {
    float value = (x[i] - mean) * scale * p.weight[i];
    if (p.bias != nullptr) value += p.bias[i];
    if (p.out_bf16 != nullptr) p.out_bf16[out + i] = FloatToBf16(value);
    if (p.add_to != nullptr) p.add_to[out + i] += value;
    if (p.out != nullptr) p.out[out + i] = value;
  }
}

}  // namespace

cudaError_t LaunchNorm(const NormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const int wanted = params.dim / kElementsPerThread;
  const int warps = (wanted + kWarpLanes - 1) / kWarpLanes;
  int threads = (warps < 1 ? 1 : warps) * kWarpLanes;
  if (threads > kMaxThreads) threads = kMaxThreads;
  return Launch(NormKernel, dim3(static_cast<unsigned>(params.num_rows)),
                dim3(static_cast<unsigned>(threads)), 0, stream, params);
}

}  // namespace promptcache::gpu
