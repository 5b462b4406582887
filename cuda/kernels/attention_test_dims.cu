// Head sizes of the tiny models that tests make: compiled for the CPU alone.
#ifdef PC_KERNELS_TEST_HEAD_DIMS
#include "cuda/kernels/attention_kernel.cuh"

namespace promptcache::gpu {

template cudaError_t LaunchAttentionBlocks<16>(const AttentionParams&,
                                               cudaStream_t);
template cudaError_t LaunchAttentionBlocks<32>(const AttentionParams&,
                                               cudaStream_t);

}  // namespace promptcache::gpu
#endif
