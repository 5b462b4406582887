#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace promptcache::gpu {

enum class ActivationKind : int32_t {
  kSilu,
  kGelu,      // by erf
  kGeluTanh,  // its tanh approximation
  kRelu,
};

// out = act(x + bias), times (up + bias of up) in a gated feed-forward block.
struct ActivationParams {
  // [num_rows][in_stride]: dim elements of x, then (gated) dim of up.
  const float* x = nullptr;
  const float* bias = nullptr;  // [dim], gated [2 * dim]; may be null
  uint16_t* out = nullptr;      // bf16 [num_rows][dim]
  int32_t num_rows = 0;
  int32_t dim = 0;
  int32_t in_stride = 0;
  bool gated = false;
  ActivationKind kind = ActivationKind::kSilu;
};

cudaError_t LaunchActivation(const ActivationParams& params,
                             cudaStream_t stream);

}  // namespace promptcache::gpu
