# Every kernel source, for the two libraries that compile them: with nvcc
# (here) and for the CPU (tests/cuda_on_cpu).
set(PROMPTCACHE_KERNEL_SOURCES
  activation.cu
  add_bias.cu
  attention.cu
  attention_hd128.cu
  attention_hd256.cu
  attention_hd64.cu
  attention_hd80.cu
  attention_hd96.cu
  attention_merge.cu
  attention_test_dims.cu
  embedding.cu
  norm.cu
  page_sum.cu
  sampling.cu
  split_qkv.cu)
