#pragma once

// GEMM over PanelLayout::kDepthPairs by vdpbf16ps. Activations are rounded to
// bf16 once a block of rows, in tiles of kTileRows rows:
// [tile][depth / 32][row of the tile][32], so that a tile's inner loop has
// constant strides. Every element is one chain of vdpbf16ps over the depth,
// whatever the tile: rows are independent bit for bit.

#include <immintrin.h>

#include "inference_worker/cpu/gemm_inl.h"

namespace promptcache::worker::cpu {

template <class S>
struct Bf16Gemm {
  static constexpr uint32_t kPanelCols = 32;
  static constexpr uint32_t kTileRows = 12;
  static constexpr size_t kGroup = 32;  // depths of a row in one cache line
  static constexpr size_t kPrefetchElements = 1024;

  static uint32_t NumGroups(uint32_t depth) { return (depth + 31) / 32; }

  static size_t PreparedBytes(uint32_t num_rows, uint32_t depth) {
    return num_rows * NumGroups(depth) * kGroup * sizeof(uint16_t);
  }

  static void PrepareRows(const float* a, size_t a_stride, uint32_t num_rows,
                          uint32_t depth, void* out) {
    auto* prepared = static_cast<uint16_t*>(out);
    const uint32_t groups = NumGroups(depth);
    for (uint32_t first = 0; first < num_rows; first += kTileRows) {
      const uint32_t left = num_rows - first;
      const uint32_t rows = left < kTileRows ? left : kTileRows;
      for (uint32_t r = 0; r < rows; ++r) {
        const float* const row = a + (first + r) * a_stride;
        for (uint32_t g = 0; g < groups; ++g) {
          PrepareGroup(row + g * kGroup, depth - g * kGroup,
                       prepared + (g * rows + r) * kGroup);
        }
      }
      prepared += rows * groups * kGroup;
    }
  }

  static void PrepareGroup(const float* a, size_t left, uint16_t* out) {
    __m512 low;
    __m512 high;
    if (left >= kGroup) {
      low = _mm512_loadu_ps(a);
      high = _mm512_loadu_ps(a + 16);
    } else {
      const uint32_t mask = (1u << left) - 1;
      low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), a);
      high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), a + 16);
    }
    const __m512bh packed = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(out, &packed, sizeof(packed));
  }

  static __m512bh LoadWeights(const uint16_t* p) {
    __m512bh v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }

  static __m512bh Broadcast(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    const __m512i wide = _mm512_set1_epi32(pair);
    __m512bh v;
    std::memcpy(&v, &wide, sizeof(v));
    return v;
  }

  // kRows rows (a whole tile of the prepared block, at `a`) times kPanels
  // adjacent panels.
  template <int kRows, int kPanels>
  static void Tile(const GemmBlock& block, const uint16_t* a, size_t row,
                   uint32_t panel) {
    __m512 sums[kRows][2 * kPanels];
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < 2 * kPanels; ++v) sums[r][v] = _mm512_setzero_ps();
    }
    const size_t stride = block.panel_elements;
    const uint16_t* b = block.panels + panel * stride;
    const uint32_t groups = NumGroups(block.depth);
    for (uint32_t g = 0; g < groups; ++g) {
      for (size_t pair = 0; pair < kGroup / 2; ++pair) {
        PROMPTCACHE_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          const uint16_t* const bp = b + p * stride;
          if constexpr (kRows <= 8) {
            __builtin_prefetch(bp + kPrefetchElements);
            __builtin_prefetch(bp + kPrefetchElements + 32);
          }
          const __m512bh low = LoadWeights(bp);
          const __m512bh high = LoadWeights(bp + 32);
          PROMPTCACHE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const __m512bh x = Broadcast(a + r * kGroup + 2 * pair);
            sums[r][2 * p] = _mm512_dpbf16_ps(sums[r][2 * p], x, low);
            sums[r][2 * p + 1] = _mm512_dpbf16_ps(sums[r][2 * p + 1], x, high);
          }
        }
        b += 2 * kPanelCols;
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

  template <int kRows, int kPanels>
  static void Panels(const GemmBlock& block, const uint16_t* a, size_t row,
                     uint32_t panel, uint32_t num_panels) {
    const uint32_t end = panel + num_panels;
    for (; panel + kPanels <= end; panel += kPanels) {
      Tile<kRows, kPanels>(block, a, row, panel);
    }
    for (; panel < end; ++panel) Tile<kRows, 1>(block, a, row, panel);
  }

  template <int kRows>
  static void RowTail(const GemmBlock& block, const uint16_t* a, size_t row,
                      uint32_t panel, uint32_t num_panels) {
    if constexpr (kRows > 0) {
      if (block.num_rows - row == kRows) {
        constexpr int kPanels = kRows <= 3 ? 4 : kRows <= 6 ? 2 : 1;
        return Panels<kRows, kPanels>(block, a, row, panel, num_panels);
      }
      RowTail<kRows - 1>(block, a, row, panel, num_panels);
    }
  }

  static void Gemm(const GemmBlock& block) {
    const auto* a = static_cast<const uint16_t*>(block.a);
    const uint32_t num_panels = (block.num_cols + kPanelCols - 1) / kPanelCols;
    const uint32_t whole = block.num_rows / kTileRows * kTileRows;
    const size_t row_elements = NumGroups(block.depth) * kGroup;
    if (whole == 0) return RowTail<kTileRows - 1>(block, a, 0, 0, num_panels);
    for (uint32_t panel = 0; panel < num_panels; ++panel) {
      for (uint32_t row = 0; row < whole; row += kTileRows) {
        Tile<kTileRows, 1>(block, a + row * row_elements, row, panel);
      }
      if (whole < block.num_rows) {
        RowTail<kTileRows - 1>(block, a + whole * row_elements, whole, panel,
                               1);
      }
    }
  }
};

}  // namespace promptcache::worker::cpu
