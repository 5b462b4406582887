#include "inference_worker/cpu/quantized_matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/float_types.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/thread_pool.h"

namespace promptcache::worker::cpu {
namespace {

constexpr size_t kLineBytes = 64;

// Where the code of a block's depth and column lies, and whether it is the
// high half of that byte.
size_t CodeOffset(QuantFormat format, uint32_t depth, uint32_t col) {
  const uint32_t per_line = HasNibbles(format) ? 8 : 4;
  return depth / per_line * kLineBytes + col * 4 + depth % 4;
}
bool IsHighNibble(QuantFormat format, uint32_t depth) {
  return HasNibbles(format) && depth % 8 >= 4;
}

float LoadHalf(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return HalfToFloat(bits);
}

// One thread's row to be filled.
struct RowMemory {
  RowMemory(uint32_t num_cols, QuantFormat format)
      : codes(num_cols),
        scales(num_cols / kQuantDepth * ScaleParts(format)),
        minima(num_cols / kQuantDepth) {}
  QuantizedMatrix::Row row() { return {codes, scales, minima}; }

  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
  std::vector<uint16_t> minima;
};

}  // namespace

absl::StatusOr<QuantizedMatrix> QuantizedMatrix::Pack(uint32_t num_rows,
                                                      uint32_t num_cols,
                                                      QuantFormat format,
                                                      RowProvider provider,
                                                      ThreadPool* pool) {
  if (num_rows == 0 || num_cols == 0 || num_cols % kQuantDepth != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantised matrix of ", num_rows, " x ", num_cols,
                     ": rows must be blocks of ", kQuantDepth));
  }
  QuantizedMatrix matrix;
  matrix.format_ = format;
  matrix.num_rows_ = num_rows;
  matrix.num_cols_ = num_cols;
  matrix.num_panels_ = (num_rows + kQuantCols - 1) / kQuantCols;
  matrix.panel_bytes_ = QuantPanelBytes(format, matrix.num_blocks());
  PC_ASSIGN_OR_RETURN(
      matrix.memory_,
      PopulatedMemory::Allocate(matrix.num_panels_ * matrix.panel_bytes_));
  std::vector<RowMemory> rows(pool->num_threads(), RowMemory(num_cols, format));
  pool->ParallelFor(matrix.num_panels_, [&](size_t panel, uint32_t thread) {
    matrix.PackPanel(static_cast<uint32_t>(panel), provider,
                     rows[thread].row());
  });
  return matrix;
}

void QuantizedMatrix::PackPanel(uint32_t panel, RowProvider provider,
                                const Row& row) {
  const uint32_t first = panel * kQuantCols;
  const uint32_t last = std::min(first + kQuantCols, num_rows_);
  for (uint32_t index = first; index < last; ++index) {
    provider(index, row);
    StoreRow(index, row);
  }
}

void QuantizedMatrix::StoreRow(uint32_t index, const Row& row) {
  std::byte* const panel = memory_.data() + index / kQuantCols * panel_bytes_;
  const uint32_t col = index % kQuantCols;
  for (uint32_t k = 0; k < num_cols_; ++k) {
    const uint32_t depth = k % kQuantDepth;
    std::byte& at = panel[k / kQuantDepth * QuantBlockBytes(format_) +
                          CodeOffset(format_, depth, col)];
    const int shift = IsHighNibble(format_, depth) ? 4 : 0;
    at |= static_cast<std::byte>(row.codes[k] << shift);
  }
  std::byte* scales = panel + CodeBytes(format_);
  const uint32_t parts = ScaleParts(format_);
  const auto store = [&scales, col](uint32_t part, uint16_t half) {
    std::memcpy(scales + (part * kQuantCols + col) * sizeof(half), &half,
                sizeof(half));
  };
  for (uint32_t b = 0; b < num_blocks(); ++b) {
    for (uint32_t part = 0; part < parts; ++part) {
      store(part, row.scales[b * parts + part]);
    }
    if (HasMinimum(format_)) store(1, row.minima[b]);
    scales += QuantBlockBytes(format_);
  }
}

void QuantizedMatrix::ReadRow(uint32_t index, float* out) const {
  const std::byte* codes = panel(index / kQuantCols);
  const uint32_t col = index % kQuantCols;
  const int mask = HasNibbles(format_) ? 15 : 255;
  for (uint32_t b = 0; b < num_blocks(); ++b) {
    const auto half = [&](uint32_t part) {
      return LoadHalf(codes + CodeBytes(format_) +
                      (part * kQuantCols + col) * sizeof(uint16_t));
    };
    const float scales[] = {half(0),
                            ScaleParts(format_) == 2 ? half(1) : half(0)};
    const float minimum = HasMinimum(format_) ? half(1) : 0.0f;
    for (uint32_t depth = 0; depth < kQuantDepth; ++depth) {
      const int byte =
          std::to_integer<int>(codes[CodeOffset(format_, depth, col)]);
      const int code = (byte >> (IsHighNibble(format_, depth) ? 4 : 0) & mask) -
                       ZeroCode(format_);
      *out++ = scales[depth / (kQuantDepth / 2)] * static_cast<float>(code) +
               minimum;
    }
    codes += QuantBlockBytes(format_);
  }
}

}  // namespace promptcache::worker::cpu
