// AMX with BF16: GEMM by tiles of 16 x 16 sums, activations rounded to bf16;
// attention by tiles with split operands; the rest as AVX-512.

#include "inference_worker/cpu/isa_kernels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <immintrin.h>

#include "inference_worker/cpu/attention_amx_inl.h"
#include "inference_worker/cpu/attention_inl.h"
#include "inference_worker/cpu/gemm_bf16_inl.h"
#include "inference_worker/cpu/simd_avx512_inl.h"

namespace promptcache::worker::cpu {
namespace {

// Rows are prepared in tiles of 16, [depth / 32][16][32] bf16, the last filled
// up with zeros: whole tiles cost less than configuring smaller ones, and a
// row's sums do not depend on what stands in the others.
class AmxGemm {
 public:
  static constexpr uint32_t kPanelCols = 32;
  static constexpr uint32_t kTileRows = 16;

  static size_t PreparedBytes(uint32_t num_rows, uint32_t depth) {
    return size_t{RowTiles(num_rows)} * TileElements(depth) * sizeof(uint16_t);
  }

  static void PrepareRows(const float* a, size_t a_stride, uint32_t num_rows,
                          uint32_t depth, void* out) {
    auto* prepared = static_cast<uint16_t*>(out);
    const uint32_t groups = NumGroups(depth);
    for (uint32_t first = 0; first < num_rows; first += kTileRows) {
      for (uint32_t r = 0; r < kTileRows; ++r) {
        uint16_t* to = prepared + r * kGroup;
        if (first + r >= num_rows) {
          for (uint32_t g = 0; g < groups; ++g, to += kTileRows * kGroup) {
            std::memset(to, 0, kGroup * sizeof(uint16_t));
          }
          continue;
        }
        const float* const row = a + (first + r) * a_stride;
        for (uint32_t g = 0; g < groups; ++g, to += kTileRows * kGroup) {
          Bf16Gemm<Avx512>::PrepareGroup(row + g * kGroup, depth - g * kGroup,
                                         to);
        }
      }
      prepared += TileElements(depth);
    }
  }

  static void Gemm(const GemmBlock& block) {
    AmxProducts::Configure();
    const uint32_t panels = (block.num_cols + kPanelCols - 1) / kPanelCols;
    const uint32_t tiles = RowTiles(block.num_rows);
    uint32_t panel = 0;
    if (tiles == 1) {
      for (; panel + 2 <= panels; panel += 2) OneTileTwoPanels(block, panel);
    }
    for (; panel < panels; ++panel) {
      uint32_t tile = 0;
      for (; tile + 2 <= tiles; tile += 2) TwoTiles(block, tile, panel);
      if (tile < tiles) OneTile(block, tile, panel);
    }
    AmxProducts::Release();
  }

 private:
  static constexpr size_t kGroup = 32;
  static constexpr size_t kRowBytes = 64;                // of a tile of A
  static constexpr size_t kPanelBytes = 4 * kPanelCols;  // two depths

  static uint32_t NumGroups(uint32_t depth) { return (depth + 31) / 32; }
  static uint32_t RowTiles(uint32_t num_rows) { return (num_rows + 15) / 16; }
  static size_t TileElements(uint32_t depth) {
    return NumGroups(depth) * kTileRows * kGroup;
  }
  static const uint16_t* RowsOf(const GemmBlock& block, uint32_t tile) {
    return static_cast<const uint16_t*>(block.a) +
           tile * TileElements(block.depth);
  }

  // One tile of rows: reading weights is all there is to do.
  static void Prefetch(const uint16_t* b) {
    for (size_t line = 0; line < 32; ++line) {
      __builtin_prefetch(b + (32 + line) * 32);
    }
  }

  static void OneTileTwoPanels(const GemmBlock& block, uint32_t panel) {
    const uint16_t* a = RowsOf(block, 0);
    const uint16_t* b = block.panels + panel * block.panel_elements;
    const uint16_t* c = b + block.panel_elements;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint32_t groups = NumGroups(block.depth);
    for (uint32_t g = 0; g < groups; ++g) {
      Prefetch(b);
      Prefetch(c);
      _tile_loadd(4, a, kRowBytes);
      _tile_loadd(5, b, kPanelBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, b + 32, kPanelBytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, c, kPanelBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, c + 32, kPanelBytes);
      _tile_dpbf16ps(3, 4, 5);
      a += kTileRows * kGroup;
      b += kGroup * kPanelCols;
      c += kGroup * kPanelCols;
    }
    alignas(64) float sums[kTileRows][2 * kPanelCols];
    _tile_stored(0, sums[0], sizeof(sums[0]));
    _tile_stored(1, sums[0] + 16, sizeof(sums[0]));
    _tile_stored(2, sums[0] + 32, sizeof(sums[0]));
    _tile_stored(3, sums[0] + 48, sizeof(sums[0]));
    for (uint32_t r = 0; r < block.num_rows; ++r) {
      StoreRow(block, r, panel, sums[r]);
      StoreRow(block, r, panel + 1, sums[r] + kPanelCols);
    }
  }

  static void TwoTiles(const GemmBlock& block, uint32_t tile, uint32_t panel) {
    const uint16_t* a = RowsOf(block, tile);
    const uint16_t* a2 = RowsOf(block, tile + 1);
    const uint16_t* b = block.panels + panel * block.panel_elements;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint32_t groups = NumGroups(block.depth);
    for (uint32_t g = 0; g < groups; ++g) {
      _tile_loadd(4, a, kRowBytes);
      _tile_loadd(6, b, kPanelBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 32, kPanelBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a2, kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      a += kTileRows * kGroup;
      a2 += kTileRows * kGroup;
      b += kGroup * kPanelCols;
    }
    alignas(64) float sums[2 * kTileRows][kPanelCols];
    _tile_stored(0, sums[0], sizeof(sums[0]));
    _tile_stored(1, sums[0] + 16, sizeof(sums[0]));
    _tile_stored(2, sums[kTileRows], sizeof(sums[0]));
    _tile_stored(3, sums[kTileRows] + 16, sizeof(sums[0]));
    StoreTile(block, tile, panel, sums[0], 2 * kTileRows);
  }

  static void OneTile(const GemmBlock& block, uint32_t tile, uint32_t panel) {
    const uint16_t* a = RowsOf(block, tile);
    const uint16_t* b = block.panels + panel * block.panel_elements;
    _tile_zero(0);
    _tile_zero(1);
    const uint32_t groups = NumGroups(block.depth);
    for (uint32_t g = 0; g < groups; ++g) {
      _tile_loadd(4, a, kRowBytes);
      _tile_loadd(6, b, kPanelBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 32, kPanelBytes);
      _tile_dpbf16ps(1, 4, 7);
      a += kTileRows * kGroup;
      b += kGroup * kPanelCols;
    }
    alignas(64) float sums[kTileRows][kPanelCols];
    _tile_stored(0, sums[0], sizeof(sums[0]));
    _tile_stored(1, sums[0] + 16, sizeof(sums[0]));
    StoreTile(block, tile, panel, sums[0], kTileRows);
  }

  static void StoreTile(const GemmBlock& block, uint32_t tile, uint32_t panel,
                        const float* sums, uint32_t rows) {
    const uint32_t first = tile * kTileRows;
    const uint32_t left = block.num_rows - first;
    if (left < rows) rows = left;
    for (uint32_t r = 0; r < rows; ++r) {
      StoreRow(block, first + r, panel, sums + r * kPanelCols);
    }
  }

  static void StoreRow(const GemmBlock& block, size_t row, uint32_t panel,
                       const float* sums) {
    const Avx512::F vectors[2] = {Avx512::Load(sums), Avx512::Load(sums + 16)};
    StoreColumns<Avx512>(block, row, panel * size_t{kPanelCols}, vectors, 2);
  }
};

constexpr IsaKernels Make() {
  IsaKernels kernels = {};
  kernels.name = "amx";
  kernels.layout = PanelLayout::kDepthPairs;
  kernels.panel_cols = AmxGemm::kPanelCols;
  kernels.block_rows = 128;
  kernels.tile_rows = 2 * AmxGemm::kTileRows;
  kernels.prepared_bytes = AmxGemm::PreparedBytes;
  kernels.prepare_rows = AmxGemm::PrepareRows;
  kernels.gemm = AmxGemm::Gemm;
  FillCommon<Avx512, AmxProducts>(&kernels);
  return kernels;
}

constexpr IsaKernels kKernels = Make();

}  // namespace

const IsaKernels* AmxKernels() { return &kKernels; }

}  // namespace promptcache::worker::cpu

#else

namespace promptcache::worker::cpu {

const IsaKernels* AmxKernels() { return nullptr; }

}  // namespace promptcache::worker::cpu

#endif
