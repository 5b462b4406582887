// A thread an element. Numerics: fp32, one rounding to bf16 at the end; expf,
// erff and tanhf as the toolkit has them, not the fast approximations.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/bf16.cuh"

namespace promptcache::gpu {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float Activate(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::kSilu:
      return x / (1.0f + expf(-x));
    case ActivationKind::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case ActivationKind::kGeluTanh: {
      constexpr float kRoot2OverPi = 0.79788456080286536f;
      const float inner = kRoot2OverPi * (x + 0.044715f * x * x * x);
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case ActivationKind::kRelu:
      return x > 0.0f ? x : 0.0f;
  }
  return x;
}

// Grid: (blocks of elements, rows).
__global__ void __launch_bounds__(kThreads)
    ActivationKernel(ActivationParams p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.dim) return;
  // Rows beyond what a grid's second dimension holds.
  for (int row = static_cast<int>(blockIdx.y); row < p.num_rows;
       row += static_cast<int>(gridDim.y)) {
    const float* in = p.x + static_cast<int64_t>(row) * p.in_stride;
    float value = in[i];
    if (p.bias != nullptr) value += p.bias[i];
    value = Activate(p.kind, value);
    if (p.gated) {
      float up = in[p.dim + i];
      if (p.bias != nullptr) up += p.bias[p.dim + i];
      value *= up;
    }
    p.out[static_cast<int64_t>(row) * p.dim + i] = FloatToBf16(value);
  }
}

}  // namespace

cudaError_t LaunchActivation(const ActivationParams& params,
                             cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  constexpr int kMaxGridRows = 65535;
  const int rows =
      params.num_rows < kMaxGridRows ? params.num_rows : kMaxGridRows;
  const dim3 grid(static_cast<unsigned>((params.dim + kThreads - 1) / kThreads),
                  static_cast<unsigned>(rows));
  return Launch(ActivationKernel, grid, dim3(kThreads), 0, stream, params);
}

}  // namespace promptcache::gpu
