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

  // kRows rows (from `a`, where the tile of `row` begins) times kPanels
  // adjacent panels.
  template <int kRows, int kPanels>
  static void Tile(const GemmBlock& block, const float* a, size_t row,
                   uint32_t panel) {
    F sums[kRows][2 * kPanels];
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < 2 * kPanels; ++v) sums[r][v] = S::Zero();
    }
    const size_t b_stride = block.panel_elements;
    const uint16_t* b = block.panels + panel * b_stride;
    const size_t depth = block.depth;
    // A constant where rows are prepared.
    const size_t a_stride = S::kPrepareRows ? kGroup : block.a_stride;
    const size_t step = S::kPrepareRows ? kGroup : depth;
    for (size_t first = 0; first < depth; first += step) {
      const size_t left = depth - first;
      const size_t count = left < step ? left : step;
      for (size_t k = 0; k < count; ++k, b += kPanelCols) {
        if constexpr (kRows <= 8) Prefetch<kPanels>(b, b_stride);
        PROMPTCACHE_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          const typename S::Pairs pairs = S::LoadPairs(b + p * b_stride);
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
      a += kRows * kGroup;
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

  // Few rows: reading the weights is all there is to do.
  template <int kPanels>
  static void Prefetch(const uint16_t* b, size_t b_stride) {
    PROMPTCACHE_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      __builtin_prefetch(b + p * b_stride + kPrefetchElements);
    }
  }

  template <int kRows, int kPanels>
  static void Panels(const GemmBlock& block, size_t row, uint32_t panel,
                     uint32_t num_panels) {
    const float* const a = TileRows(block, row);
    const uint32_t end = panel + num_panels;
    for (; panel + kPanels <= end; panel += kPanels) {
      Tile<kRows, kPanels>(block, a, row, panel);
    }
    for (; panel < end; ++panel) Tile<kRows, 1>(block, a, row, panel);
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
    if (whole == 0) return RowTail<kRows - 1>(block, 0, 0, num_panels);
    for (uint32_t panel = 0; panel < num_panels; ++panel) {
      for (uint32_t row = 0; row < whole; row += S::kTileRows) {
        Tile<kRows, 1>(block, TileRows(block, row), row, panel);
      }
      if (whole < block.num_rows) RowTail<kRows - 1>(block, whole, panel, 1);
    }
  }

  // Where the rows of the tile that begins with `row` lie.
  static const float* TileRows(const GemmBlock& block, size_t row) {
    const auto* const a = static_cast<const float*>(block.a);
    return a + row * (S::kPrepareRows ? NumGroups(block.depth) * kGroup
                                      : block.a_stride);
  }

  static size_t NumGroups(size_t depth) {
    return (depth + kGroup - 1) / kGroup;
  }

  static size_t PreparedBytes(uint32_t num_rows, uint32_t depth) {
    if (!S::kPrepareRows) return 0;
    return num_rows * NumGroups(depth) * kGroup * sizeof(float);
  }

  // [tile][depth / kGroup][row of the tile][kGroup]: with constant strides a
  // tile of many rows needs one pointer.
  static void PrepareRows(const float* a, size_t a_stride, uint32_t num_rows,
                          uint32_t depth, void* out) {
    auto* prepared = static_cast<float*>(out);
    const size_t groups = NumGroups(depth);
    for (uint32_t first = 0; first < num_rows; first += S::kTileRows) {
      const uint32_t left = num_rows - first;
      const uint32_t rows = left < S::kTileRows ? left : S::kTileRows;
      for (uint32_t r = 0; r < rows; ++r) {
        const float* const row = a + (first + r) * a_stride;
        for (size_t g = 0; g < groups; ++g) {
          const size_t rest = depth - g * kGroup;
          std::memcpy(prepared + (g * rows + r) * kGroup, row + g * kGroup,
                      (rest < kGroup ? rest : kGroup) * sizeof(float));
        }
      }
      prepared += rows * groups * kGroup;
    }
  }

  static constexpr size_t kGroup = 16;  // depths: a cache line of a row
  static constexpr size_t kPrefetchElements = 1024;
};

}  // namespace promptcache::worker::cpu
