#include "cuda/kernels/attention_kernel.cuh"

namespace promptcache::gpu {

template cudaError_t LaunchAttentionBlocks<96>(const AttentionParams&,
                                               cudaStream_t);

}  // namespace promptcache::gpu
