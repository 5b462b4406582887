#pragma once

// GEMM over PanelLayout::kColumnPairs: bf16 weights widened in registers, fp32
// activations and sums. Every element is one chain of fused multiply-adds over
// the depth, whatever the tile: rows are independent bit for bit.

#include "inference_worker/cpu/elementwise_inl.h"

namespace promptcache::worker::cpu {

// C[row][0 .. 2 lanes) for one row and panel; columns beyond `valid` are not
// written.
template <class S>
void StoreColumns(const GemmBlock& block, size_t row, size_t col,
                  const typename S::F* sums, uint32_t num_vectors) {
  constexpr size_t kLanes = S::kLanes;
  float* const c = block.c + row * block.c_stride + col;
  const float* const residual =
      block.residual == nullptr ? nullptr
                                : block.residual + row * block.c_stride + col;
  const float* const bias = block.bias == nullptr ? nullptr : block.bias + col;
  const size_t valid = block.num_cols - col;
  for (uint32_t v = 0; v < num_vectors; ++v) {
    const size_t at = v * kLanes;
    if (at + kLanes <= valid) {
      typename S::F sum = sums[v];
      if (bias != nullptr) sum = S::Add(sum, S::Load(bias + at));
      if (residual != nullptr) sum = S::Add(sum, S::Load(residual + at));
      S::Store(c + at, sum);
      continue;
    }
    float lanes[kLanes];
    S::Store(lanes, sums[v]);
    for (size_t j = at; j < valid; ++j) {
      float sum = lanes[j - at];
      if (bias != nullptr) sum += bias[j];
      if (residual != nullptr) sum += residual[j];
      c[j] = sum;
    }
    return;
  }
}

template <class S>
struct ColumnPairGemm {
  using F = typename S::F;
  static constexpr uint32_t kPanelCols = 2 * S::kLanes;

  // kRows rows times kPanels adjacent panels.
  template <int kRows, int kPanels>
  static void Tile(const GemmBlock& block, size_t row, uint32_t panel) {
    F sums[kRows][2 * kPanels];
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < 2 * kPanels; ++v) sums[r][v] = S::Zero();
    }
    const float* const a =
        static_cast<const float*>(block.a) + row * block.a_stride;
    const size_t a_stride = block.a_stride;
    const uint16_t* const b = block.panels + panel * block.panel_elements;
    const size_t b_stride = block.panel_elements;
    const size_t depth = block.depth;
    for (size_t k = 0; k < depth; ++k) {
      const uint16_t* const bk = b + k * kPanelCols;
      if constexpr (kRows <= 2) {
        // One line of each panel every other step: reading weights is all
        // there is to do.
        PROMPTCACHE_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          __builtin_prefetch(bk + p * b_stride + kPrefetchElements);
        }
      }
      PROMPTCACHE_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        const typename S::Pairs pairs = S::LoadPairs(bk + p * b_stride);
        const F low = S::Low(pairs);
        const F high = S::High(pairs);
        PROMPTCACHE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const F x = S::Set1(a[r * a_stride + k]);
          sums[r][2 * p] = S::Fma(x, low, sums[r][2 * p]);
          sums[r][2 * p + 1] = S::Fma(x, high, sums[r][2 * p + 1]);
        }
      }
    }
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        const size_t col = (panel + p) * size_t{kPanelCols};
        StoreColumns<S>(block, row + r, col, &sums[r][2 * p], 2);
      }
    }
  }

  template <int kRows, int kPanels>
  static void Panels(const GemmBlock& block, size_t row, uint32_t panel,
                     uint32_t num_panels) {
    const uint32_t end = panel + num_panels;
    for (; panel + kPanels <= end; panel += kPanels) {
      Tile<kRows, kPanels>(block, row, panel);
    }
    for (; panel < end; ++panel) Tile<kRows, 1>(block, row, panel);
  }

  // The last rows, fewer than a tile: with so many panels side by side as
  // their sums leave registers for.
  template <int kRows>
  static void RowTail(const GemmBlock& block, size_t row, uint32_t panel,
                      uint32_t num_panels) {
    if constexpr (kRows > 0) {
      if (block.num_rows - row == kRows) {
        constexpr int kFit = S::kSumRegisters / (2 * kRows);
        constexpr int kPanels = kFit > 4 ? 4 : kFit < 1 ? 1 : kFit;
        return Panels<kRows, kPanels>(block, row, panel, num_panels);
      }
      RowTail<kRows - 1>(block, row, panel, num_panels);
    }
  }

  static void Gemm(const GemmBlock& block) {
    constexpr int kRows = S::kTileRows;
    const uint32_t num_panels = (block.num_cols + kPanelCols - 1) / kPanelCols;
    const uint32_t whole = block.num_rows / S::kTileRows * S::kTileRows;
    if (whole == 0) return RowTail<S::kTileRows - 1>(block, 0, 0, num_panels);
    for (uint32_t panel = 0; panel < num_panels; ++panel) {
      for (uint32_t row = 0; row < whole; row += S::kTileRows) {
        Tile<kRows, 1>(block, row, panel);
      }
      if (whole < block.num_rows) {
        RowTail<S::kTileRows - 1>(block, whole, panel, 1);
      }
    }
  }

  static constexpr size_t kPrefetchElements = 1024;

  static size_t PreparedBytes(uint32_t, uint32_t) { return 0; }
  static void PrepareRows(const float*, size_t, uint32_t, uint32_t, void*) {}
};

}  // namespace promptcache::worker::cpu
