// A block a row, its threads along the row; fp32.

#include "cuda/kernels/add_bias.h"
#include "cuda/kernels/device.cuh"

namespace promptcache::gpu {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) AddBiasKernel(AddBiasParams p) {
  float* x = p.x + static_cast<int64_t>(blockIdx.x) * p.dim;
  for (int i = static_cast<int>(threadIdx.x); i < p.dim; i += kThreads) {
    x[i] += p.bias[i];
  }
}

}  // namespace

cudaError_t LaunchAddBias(const AddBiasParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return Launch(AddBiasKernel, dim3(static_cast<unsigned>(params.num_rows)),
                dim3(kThreads), 0, stream, params);
}

}  // namespace promptcache::gpu
