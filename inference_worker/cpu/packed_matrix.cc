#include "inference_worker/cpu/packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/thread_pool.h"

namespace promptcache::worker::cpu {
namespace {

constexpr uint32_t kDepthGroup = 32;

}  // namespace

uint16_t ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  bits += 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>(bits >> 16);
}

float FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

absl::StatusOr<PackedMatrix> PackedMatrix::Pack(
    uint32_t num_rows, uint32_t num_cols, PanelLayout layout,
    uint32_t panel_cols, RowProvider provider, ThreadPool* pool) {
  if (num_rows == 0 || num_cols == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("matrix of ", num_rows, " x ", num_cols));
  }
  PackedMatrix matrix;
  matrix.num_rows_ = num_rows;
  matrix.num_cols_ = num_cols;
  matrix.layout_ = layout;
  matrix.panel_cols_ = panel_cols;
  matrix.num_panels_ = (num_rows + panel_cols - 1) / panel_cols;
  const size_t depth =
      layout == PanelLayout::kDepthPairs
          ? (num_cols + kDepthGroup - 1) / kDepthGroup * size_t{kDepthGroup}
          : num_cols;
  // Whole cache lines, so that every panel begins on one.
  matrix.panel_elements_ = (depth * panel_cols + 31) / 32 * 32;
  PC_ASSIGN_OR_RETURN(
      matrix.memory_,
      PopulatedMemory::Allocate(matrix.num_panels_ * matrix.panel_elements_ *
                                sizeof(uint16_t)));
  std::vector<std::vector<float>> rows(pool->num_threads(),
                                       std::vector<float>(num_cols));
  pool->ParallelFor(matrix.num_panels_, [&](size_t panel, uint32_t thread) {
    matrix.PackPanel(static_cast<uint32_t>(panel), provider, rows[thread]);
  });
  return matrix;
}

void PackedMatrix::PackPanel(uint32_t panel, RowProvider provider,
                             std::span<float> row) {
  uint16_t* const data = reinterpret_cast<uint16_t*>(memory_.data());
  const uint32_t first = panel * panel_cols_;
  const uint32_t last = std::min(first + panel_cols_, num_rows_);
  for (uint32_t index = first; index < last; ++index) {
    provider(index, row);
    for (uint32_t col = 0; col < num_cols_; ++col) {
      data[ElementIndex(index, col)] = ToBf16(row[col]);
    }
  }
}

size_t PackedMatrix::ElementIndex(uint32_t row, uint32_t col) const {
  const size_t base = (row / panel_cols_) * panel_elements_;
  const size_t j = row % panel_cols_;
  if (layout_ == PanelLayout::kDepthPairs) {
    return base + (col / 2 * size_t{panel_cols_} + j) * 2 + col % 2;
  }
  const size_t lanes = panel_cols_ / 2;
  return base + (col * lanes + j % lanes) * 2 + j / lanes;
}

void PackedMatrix::ReadRow(uint32_t index, float* out) const {
  const uint16_t* const first =
      reinterpret_cast<const uint16_t*>(memory_.data()) +
      ElementIndex(index, 0);
  if (layout_ == PanelLayout::kColumnPairs) {
    for (size_t col = 0; col < num_cols_; ++col) {
      out[col] = FromBf16(first[col * panel_cols_]);
    }
    return;
  }
  for (size_t col = 0; col < num_cols_; ++col) {
    out[col] = FromBf16(first[col / 2 * 2 * panel_cols_ + col % 2]);
  }
}

}  // namespace promptcache::worker::cpu
