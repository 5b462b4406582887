#pragma once

// GEMM over quantised panels (quant_format.h): templates over a Simd type with
// the integer operations of quant_*.cc.

#include "inference_worker/cpu/gemm_inl.h"
#include "inference_worker/cpu/quant_kernels.h"

namespace promptcache::worker::cpu {

// Bits of 1e-30: what is smaller counts as zero, so that no scale overflows.
inline constexpr int32_t kTinyBits = 0x0da24260;

namespace {

inline void QuantizeZeros(int8_t* codes, float* scale, int32_t* sum) {
  std::memset(codes, 0, kQuantDepth);
  *scale = 0;
  *sum = 0;
}

}  // namespace

// Activations of kTileRows rows at a time, [tile][block]: codes [row][32],
// scales [row], corrections [part][row]: scale times the codes' sum for weights
// with minima, else -zero times their sum as an integer.
template <class S>
struct QuantRows {
  static void Prepare(const float* a, size_t a_stride, uint32_t num_rows,
                      uint32_t depth, QuantFormat weights, void* out) {
    auto* at = static_cast<std::byte*>(out);
    const uint32_t num_blocks = depth / kQuantDepth;
    for (uint32_t first = 0; first < num_rows; first += S::kTileRows) {
      const uint32_t left = num_rows - first;
      const uint32_t rows = left < S::kTileRows ? left : S::kTileRows;
      for (uint32_t b = 0; b < num_blocks; ++b) {
        for (uint32_t r = 0; r < rows; ++r) {
          const float* x = a + (first + r) * a_stride + size_t{b} * kQuantDepth;
          PrepareBlock(x, rows, r, weights, at);
        }
        at += rows * PreparedQuantBytes(weights);
      }
    }
  }

  static void PrepareBlock(const float* x, uint32_t rows, uint32_t row,
                           QuantFormat weights, std::byte* block) {
    float scale;
    int32_t sum;
    auto* const codes = reinterpret_cast<int8_t*>(block) + row * kQuantDepth;
    S::Quantize(x, codes, &scale, &sum);
    std::byte* const scales = block + rows * kQuantDepth;
    std::byte* const corrections = scales + rows * sizeof(float);
    std::memcpy(scales + row * sizeof(float), &scale, sizeof(scale));
    if (HasMinimum(weights)) {
      const float correction = scale * static_cast<float>(sum);
      std::memcpy(corrections + row * sizeof(float), &correction,
                  sizeof(correction));
      return;
    }
    const uint32_t parts = ScaleParts(weights);
    for (uint32_t part = 0; part < parts; ++part) {
      int32_t part_sum = 0;
      if (part + 1 < parts) {
        for (uint32_t i = 0; i < kQuantDepth / 2; ++i) part_sum += codes[i];
        sum -= part_sum;
      } else {
        part_sum = sum;
      }
      const int32_t correction = -ZeroCode(weights) * part_sum;
      std::memcpy(corrections + (part * rows + row) * sizeof(float),
                  &correction, sizeof(correction));
    }
  }
};

template <class S, QuantFormat kFormat>
struct QuantGemm {
  using F = typename S::F;
  using Sum = typename S::Sum;
  // Vectors of columns in a panel.
  static constexpr uint32_t kPerPanel = kQuantCols / S::kLanes;
  static constexpr size_t kVectorBytes = 4 * S::kLanes;  // of a line of codes
  static constexpr size_t kLineBytes = 4 * kQuantCols;
  // Lines of codes of a part of a block.
  static constexpr uint32_t kLines =
      CodeBytes(kFormat) / ScaleParts(kFormat) / kLineBytes;

  // kRows rows (a whole tile of the prepared block, at `a`) times kVectors
  // adjacent vectors of columns, the first of them `vector`.
  template <int kRows, int kVectors>
  static void Tile(const GemmBlock& block, const std::byte* a, size_t row,
                   uint32_t vector) {
    F sums[kRows][kVectors];
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = S::Zero();
    }
    const uint32_t num_blocks = block.depth / kQuantDepth;
    const size_t stride = block.panel_elements * sizeof(uint16_t);
    // Of a panel; 0 for tiles of whole panels.
    const uint32_t half = kVectors < kPerPanel ? vector % kPerPanel : 0;
    const std::byte* codes = reinterpret_cast<const std::byte*>(block.panels) +
                             vector / kPerPanel * stride + half * kVectorBytes;
    // Few rows: reading the weights is all there is to do. From here on, what
    // lies ahead belongs to the next tile.
    constexpr size_t kPanels = (kVectors + kPerPanel - 1) / kPerPanel;
    const size_t left = stride > kPrefetchBytes ? stride - kPrefetchBytes : 0;
    const auto wrap = static_cast<uint32_t>(left / QuantBlockBytes(kFormat));
    for (uint32_t b = 0; b < num_blocks; ++b) {
      if constexpr (kRows <= 4) {
        const size_t next = b < wrap ? 0 : (kPanels - 1) * stride;
        Prefetch<kPanels>(codes + kPrefetchBytes + next, stride);
      }
      Block<kRows, kVectors>(codes, half, stride, a, sums);
      codes += QuantBlockBytes(kFormat);
      a += kRows * PreparedQuantBytes(kFormat);
    }
    StoreTile<kRows, kVectors>(block, row, vector * size_t{S::kLanes}, sums);
  }

  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void StoreTile(
      const GemmBlock& block, size_t row, size_t col,
      const F (&sums)[kRows][kVectors]) {
    constexpr size_t kLanes = S::kLanes;
    if (block.bias != nullptr || col + kVectors * kLanes > block.num_cols) {
      PROMPTCACHE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        PROMPTCACHE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const size_t at = col + v * kLanes;
          if (at >= block.num_cols) continue;
          StoreColumns<S>(block, row + r, at, &sums[r][v], 1);
        }
      }
      return;
    }
    // The usual case, without calls.
    float* const c = block.c + row * block.c_stride + col;
    const float* const residual =
        block.residual == nullptr ? nullptr
                                  : block.residual + row * block.c_stride + col;
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const size_t at = r * block.c_stride + v * kLanes;
        F sum = sums[r][v];
        if (residual != nullptr) sum = S::Add(sum, S::Load(residual + at));
        S::Store(c + at, sum);
      }
    }
  }

  // Where vector v of the tile lies, behind its first one.
  static constexpr size_t Offset(int v, size_t stride, size_t vector_bytes) {
    return v / kPerPanel * stride + v % kPerPanel * vector_bytes;
  }

  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void Block(
      const std::byte* codes, uint32_t half, size_t stride, const std::byte* a,
      F (&sums)[kRows][kVectors]) {
    constexpr uint32_t kParts = ScaleParts(kFormat);
    const std::byte* const scales =
        codes + CodeBytes(kFormat) - half * (kVectorBytes / 2);
    const std::byte* const a_scales = a + kRows * kQuantDepth;
    const std::byte* const corrections = a_scales + kRows * sizeof(float);
    Sum dots[kRows][kVectors];
    Dots<kRows, kVectors>(codes, stride, a, corrections, dots);
    AddDots<kRows, kVectors>(dots, scales, stride, a_scales, corrections, sums);
    if constexpr (kParts == 2) {
      const std::byte* const second = corrections + kRows * sizeof(int32_t);
      Dots<kRows, kVectors>(codes + CodeBytes(kFormat) / 2, stride,
                            a + kQuantDepth / 2, second, dots);
      AddDots<kRows, kVectors>(dots, scales + ScaleBytes(kFormat) / 2, stride,
                               a_scales, second, sums);
    }
  }

  // Integer products of a part of a block.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void Dots(
      const std::byte* codes, size_t stride, const std::byte* a,
      const std::byte* corrections, Sum (&dots)[kRows][kVectors]) {
    PROMPTCACHE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        dots[r][v] =
            S::template Start<kFormat>(corrections + r * sizeof(int32_t));
      }
    }
    PROMPTCACHE_UNROLL
    for (uint32_t line = 0; line < kLines; ++line) {
      PROMPTCACHE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const std::byte* const at =
            codes + Offset(v, stride, kVectorBytes) + line * kLineBytes;
        if constexpr (HasNibbles(kFormat)) {
          const auto low = S::LowNibbles(at);
          PROMPTCACHE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            dots[r][v] =
                S::StepNibbles(dots[r][v], low, a + r * kQuantDepth + line * 8);
          }
          const auto high = S::HighNibbles(at);
          PROMPTCACHE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            dots[r][v] = S::StepNibbles(dots[r][v], high,
                                        a + r * kQuantDepth + line * 8 + 4);
          }
        } else {
          const auto bytes = S::LoadBytes(at);
          PROMPTCACHE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            dots[r][v] =
                S::StepBytes(dots[r][v], bytes, a + r * kQuantDepth + line * 4);
          }
        }
      }
    }
  }

  // Times their scales, and what the minima add.
  template <int kRows, int kVectors>
  static inline __attribute__((always_inline)) void AddDots(
      const Sum (&dots)[kRows][kVectors], const std::byte* scales,
      size_t stride, const std::byte* a_scales, const std::byte* corrections,
      F (&sums)[kRows][kVectors]) {
    PROMPTCACHE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* const at = scales + Offset(v, stride, kVectorBytes / 2);
      const F scale = S::LoadHalf(at);
      F minimum = S::Zero();
      if constexpr (HasMinimum(kFormat)) {
        minimum = S::LoadHalf(at + ScaleBytes(kFormat) / 2);
      }
      PROMPTCACHE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if constexpr (HasMinimum(kFormat)) {
          sums[r][v] =
              S::Fma(minimum, S::Set1At(corrections + r * 4), sums[r][v]);
        }
        const F dot = S::template Finish<kFormat>(
            dots[r][v], corrections + r * sizeof(int32_t));
        sums[r][v] =
            S::Fma(dot, S::Mul(scale, S::Set1At(a_scales + r * 4)), sums[r][v]);
      }
    }
  }

  // One block of each panel.
  template <int kPanels>
  static void Prefetch(const std::byte* at, size_t stride) {
    PROMPTCACHE_UNROLL
    for (int p = 0; p < kPanels; ++p) {
      for (size_t i = 0; i < QuantBlockBytes(kFormat); i += 64) {
        __builtin_prefetch(at + p * stride + i);
      }
    }
  }

  template <int kRows, int kVectors>
  static void Vectors(const GemmBlock& block, const std::byte* a, size_t row,
                      uint32_t vector, uint32_t end) {
    for (; vector + kVectors <= end; vector += kVectors) {
      Tile<kRows, kVectors>(block, a, row, vector);
    }
    if constexpr (kVectors > 2) {
      if (vector + 2 <= end) {
        Tile<kRows, 2>(block, a, row, vector);
        vector += 2;
      }
    }
    for (; vector < end; ++vector) Tile<kRows, 1>(block, a, row, vector);
  }

  // The last rows, fewer than a tile: as many vectors side by side as their
  // sums leave registers for.
  template <int kRows>
  static void RowTail(const GemmBlock& block, const std::byte* a, size_t row,
                      uint32_t vector, uint32_t end) {
    if constexpr (kRows > 0) {
      if (block.num_rows - row == kRows) {
        constexpr int kFit = S::kQuantSums / kRows;
        constexpr int kVectors = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
        return Vectors<kRows, kVectors>(block, a, row, vector, end);
      }
      RowTail<kRows - 1>(block, a, row, vector, end);
    }
  }

  static void Gemm(const GemmBlock& block) {
    constexpr int kRows = S::kTileRows;
    const auto* const a = static_cast<const std::byte*>(block.a);
    // Whole panels: columns beyond num_cols are computed and not written.
    const uint32_t num_vectors =
        (block.num_cols + kQuantCols - 1) / kQuantCols * kPerPanel;
    const uint32_t whole = block.num_rows / kRows * kRows;
    const size_t row_bytes =
        block.depth / kQuantDepth * PreparedQuantBytes(kFormat);
    if (whole == 0) return RowTail<kRows - 1>(block, a, 0, 0, num_vectors);
    constexpr int kVectors = S::kQuantSums / kRows;
    static_assert(kVectors >= 1);
    const uint32_t paired = num_vectors / kVectors * kVectors;
    for (uint32_t v = 0; v < num_vectors;) {
      const uint32_t count = v < paired ? kVectors : 1;
      for (uint32_t row = 0; row < whole; row += kRows) {
        if (count == kVectors) {
          Tile<kRows, kVectors>(block, a + row * row_bytes, row, v);
        } else {
          Tile<kRows, 1>(block, a + row * row_bytes, row, v);
        }
      }
      if (whole < block.num_rows) {
        RowTail<kRows - 1>(block, a + whole * row_bytes, whole, v, v + count);
      }
      v += count;
    }
  }

  static constexpr size_t kPrefetchBytes = 2048;
};

template <class S>
constexpr QuantKernels MakeQuantKernels(const char* name, uint32_t block_rows) {
  QuantKernels kernels = {};
  kernels.name = name;
  kernels.block_rows = block_rows;
  kernels.tile_rows = S::kTileRows;
  kernels.prepare_rows = QuantRows<S>::Prepare;
  kernels.gemm[static_cast<int>(QuantFormat::kNibbles)] =
      QuantGemm<S, QuantFormat::kNibbles>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kNibblesMin)] =
      QuantGemm<S, QuantFormat::kNibblesMin>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kBytes)] =
      QuantGemm<S, QuantFormat::kBytes>::Gemm;
  kernels.gemm[static_cast<int>(QuantFormat::kByteHalves)] =
      QuantGemm<S, QuantFormat::kByteHalves>::Gemm;
  return kernels;
}

}  // namespace promptcache::worker::cpu
