# Every kernel source, for the two libraries that compile them: with nvcc
# (here) and for the CPU (tests/cuda_on_cpu).
set(PROMPTCACHE_KERNEL_SOURCES)
