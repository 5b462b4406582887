// AVX2 with FMA and F16C: eight lanes, bf16 widened in registers.

#include "inference_worker/cpu/isa_kernels.h"

#if defined(__AVX2__) && defined(__FMA__)

#include "inference_worker/cpu/attention_inl.h"
#include "inference_worker/cpu/gemm_inl.h"
#include "inference_worker/cpu/simd_avx2_inl.h"

namespace promptcache::worker::cpu {
namespace {

constexpr IsaKernels Make() {
  using G = ColumnPairGemm<Avx2>;
  IsaKernels kernels = {};
  kernels.name = "avx2";
  kernels.layout = PanelLayout::kColumnPairs;
  kernels.panel_cols = G::kPanelCols;
  kernels.block_rows = 48;
  kernels.tile_rows = Avx2::kTileRows;
  kernels.prepared_bytes = G::PreparedBytes;
  kernels.prepare_rows = G::PrepareRows;
  kernels.gemm = G::Gemm;
  FillCommon<Avx2>(&kernels);
  return kernels;
}

constexpr IsaKernels kKernels = Make();

}  // namespace

const IsaKernels* Avx2Kernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const IsaKernels* Avx2Kernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
