#include "cuda/kernels/attention_kernel.cuh"

namespace promptcache::gpu {

template cudaError_t LaunchAttentionBlocks<128>(const AttentionParams&,
                                                cudaStream_t);

}  // namespace promptcache::gpu
