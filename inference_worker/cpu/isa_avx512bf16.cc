// AVX-512 (F, BW, VL, DQ) with BF16: sixteen lanes; GEMM by vdpbf16ps, with
// activations rounded to bf16; attention in fp32.

#include "inference_worker/cpu/isa_kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "inference_worker/cpu/attention_inl.h"
#include "inference_worker/cpu/gemm_bf16_inl.h"
#include "inference_worker/cpu/simd_avx512_inl.h"

namespace promptcache::worker::cpu {
namespace {

constexpr IsaKernels Make() {
  using G = Bf16Gemm<Avx512>;
  IsaKernels kernels = {};
  kernels.name = "avx512bf16";
  kernels.layout = PanelLayout::kDepthPairs;
  kernels.panel_cols = G::kPanelCols;
  kernels.block_rows = 96;
  kernels.tile_rows = G::kTileRows;
  kernels.prepared_bytes = G::PreparedBytes;
  kernels.prepare_rows = G::PrepareRows;
  kernels.gemm = G::Gemm;
  FillCommon<Avx512>(&kernels);
  return kernels;
}

constexpr IsaKernels kKernels = Make();

}  // namespace

const IsaKernels* Avx512Bf16Kernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const IsaKernels* Avx512Bf16Kernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
