// AVX-512 (F, BW, VL, DQ): sixteen lanes, bf16 widened in registers. For
// processors without vdpbf16ps and those of Intel, where it multiplies half as
// much as fp32 does (measured: 110 and 229 GFLOP/s a core).

#include "inference_worker/cpu/isa_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)

#include "inference_worker/cpu/attention_inl.h"
#include "inference_worker/cpu/gemm_inl.h"
#include "inference_worker/cpu/simd_avx512_inl.h"

namespace promptcache::worker::cpu {
namespace {

constexpr IsaKernels Make() {
  using G = ColumnPairGemm<Avx512>;
  IsaKernels kernels = {};
  kernels.name = "avx512";
  kernels.layout = PanelLayout::kColumnPairs;
  kernels.panel_cols = G::kPanelCols;
  kernels.block_rows = 96;
  kernels.tile_rows = Avx512::kTileRows;
  kernels.prepared_bytes = G::PreparedBytes;
  kernels.prepare_rows = G::PrepareRows;
  kernels.gemm = G::Gemm;
  FillCommon<Avx512>(&kernels);
  return kernels;
}

constexpr IsaKernels kKernels = Make();

}  // namespace

const IsaKernels* Avx512Kernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const IsaKernels* Avx512Kernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
