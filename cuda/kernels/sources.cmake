# Every kernel source, for the two libraries that compile them: with nvcc
# (here) and for the CPU (tests/cuda_on_cpu).
set(PROMPTCACHE_KERNEL_SOURCES
  activation.cu
  add_bias.cu
  embedding.cu
  norm.cu
  page_sum.cu
  sampling.cu
  split_qkv.cu)
