#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "inference_worker/cpu/panel_layout.h"
#include "inference_worker/cpu/populated_memory.h"

namespace promptcache::worker::cpu {

class ThreadPool;

// Round to nearest, ties to even; a NaN stays a NaN.
uint16_t ToBf16(float value);
float FromBf16(uint16_t bits);

// Weights W[num_rows, num_cols] (row n makes output column n) as bf16 panels,
// packed once at load for one set of kernels. The last panel is padded with
// zeros. Immutable; movable.
class PackedMatrix {
 public:
  // Fills `row` (num_cols floats) with row `index`. Called once for each row,
  // from several threads at a time.
  using RowProvider =
      absl::FunctionRef<void(uint64_t index, std::span<float> row)>;

  PackedMatrix() = default;

  uint32_t num_rows() const { return num_rows_; }
  uint32_t num_cols() const { return num_cols_; }
  uint32_t num_panels() const { return num_panels_; }
  uint32_t panel_cols() const { return panel_cols_; }
  PanelLayout layout() const { return layout_; }
  size_t num_bytes() const { return memory_.num_bytes(); }
  // 64-byte aligned.
  const uint16_t* panel(uint32_t index) const {
    return reinterpret_cast<const uint16_t*>(memory_.data()) +
           index * panel_elements_;
  }
  // Elements between two panels.
  size_t panel_elements() const { return panel_elements_; }

  // Row `index` widened to fp32: the embedding of a token.
  void ReadRow(uint32_t index, float* out) const;

 private:
  friend class Kernels;
  static absl::StatusOr<PackedMatrix> Pack(uint32_t num_rows, uint32_t num_cols,
                                           PanelLayout layout,
                                           uint32_t panel_cols,
                                           RowProvider provider,
                                           ThreadPool* pool);
  size_t ElementIndex(uint32_t row, uint32_t col) const;
  void PackPanel(uint32_t panel, RowProvider provider, std::span<float> row);

  uint32_t num_rows_ = 0;
  uint32_t num_cols_ = 0;
  uint32_t num_panels_ = 0;
  uint32_t panel_cols_ = 0;
  size_t panel_elements_ = 0;
  PanelLayout layout_ = PanelLayout::kColumnPairs;
  PopulatedMemory memory_;
};

}  // namespace promptcache::worker::cpu
