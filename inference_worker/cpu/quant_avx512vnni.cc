// Quantised GEMM by AVX-512 with VNNI.

#include "inference_worker/cpu/quant_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__) && defined(__AVX512VNNI__)

#include "inference_worker/cpu/quant_avx512vnni_inl.h"

namespace promptcache::worker::cpu {
namespace {

constexpr QuantKernels kKernels =
    MakeQuantKernels<Avx512Vnni>("avx512vnni", 96);

}  // namespace

const QuantKernels* Avx512VnniQuantKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const QuantKernels* Avx512VnniQuantKernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
