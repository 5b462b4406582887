#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "inference_worker/cpu/populated_memory.h"
#include "inference_worker/cpu/quant_format.h"

namespace promptcache::worker::cpu {

class ThreadPool;

// Weights W[num_rows, num_cols] (row n makes output column n) that stay
// quantised, repacked once at load into panels (quant_format.h) that every set
// of kernels reads. The last panel is padded with zeros. Immutable; movable.
class QuantizedMatrix {
 public:
  // A row to fill: num_cols codes; ScaleParts scales and, where the format has
  // minima, a minimum (fp16 bits) for each block of kQuantDepth.
  struct Row {
    std::span<uint8_t> codes;
    std::span<uint16_t> scales;
    std::span<uint16_t> minima;
  };
  // Called once for each row, from several threads at a time.
  using RowProvider = absl::FunctionRef<void(uint64_t index, const Row& row)>;

  QuantizedMatrix() = default;

  QuantFormat format() const { return format_; }
  uint32_t num_rows() const { return num_rows_; }
  uint32_t num_cols() const { return num_cols_; }
  uint32_t num_panels() const { return num_panels_; }
  size_t panel_bytes() const { return panel_bytes_; }
  size_t num_bytes() const { return memory_.num_bytes(); }
  // 64-byte aligned.
  const std::byte* panel(uint32_t index) const {
    return memory_.data() + index * panel_bytes_;
  }

  // Row `index` in fp32, as the format defines it.
  void ReadRow(uint32_t index, float* out) const;

 private:
  friend class Kernels;
  // InvalidArgument for an empty matrix and for rows that are not whole blocks.
  static absl::StatusOr<QuantizedMatrix> Pack(uint32_t num_rows,
                                              uint32_t num_cols,
                                              QuantFormat format,
                                              RowProvider provider,
                                              ThreadPool* pool);
  uint32_t num_blocks() const { return num_cols_ / kQuantDepth; }
  void PackPanel(uint32_t panel, RowProvider provider, const Row& row);
  void StoreRow(uint32_t index, const Row& row);

  QuantFormat format_ = QuantFormat::kNibbles;
  uint32_t num_rows_ = 0;
  uint32_t num_cols_ = 0;
  uint32_t num_panels_ = 0;
  size_t panel_bytes_ = 0;
  PopulatedMemory memory_;
};

}  // namespace promptcache::worker::cpu
