#pragma once

#include "cuda/kernels/attention.h"

namespace promptcache::gpu {

// The merge of partial states, as part of LaunchAttention.
cudaError_t LaunchAttentionMerge(const AttentionParams& params,
                                 cudaStream_t stream);

}  // namespace promptcache::gpu
