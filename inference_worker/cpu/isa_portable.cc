// The kernels for any processor, in GCC's vector extension: four lanes, what
// every 64-bit machine has. Products and sums are rounded apart.

#include "inference_worker/cpu/attention_inl.h"
#include "inference_worker/cpu/gemm_inl.h"
#include "inference_worker/cpu/simd_portable_inl.h"

namespace promptcache::worker::cpu {
namespace {

constexpr IsaKernels Make() {
  using G = ColumnPairGemm<Portable>;
  IsaKernels kernels = {};
  kernels.name = "portable";
  kernels.layout = PanelLayout::kColumnPairs;
  kernels.panel_cols = G::kPanelCols;
  kernels.block_rows = 32;
  kernels.tile_rows = Portable::kTileRows;
  kernels.prepared_bytes = G::PreparedBytes;
  kernels.prepare_rows = G::PrepareRows;
  kernels.gemm = G::Gemm;
  FillCommon<Portable>(&kernels);
  return kernels;
}

constexpr IsaKernels kKernels = Make();

}  // namespace

const IsaKernels* PortableKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu
