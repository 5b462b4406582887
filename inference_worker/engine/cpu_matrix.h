#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Weights W[num_rows, num_cols] packed for one set of kernels: rows of one
// kind after another, bf16 or quantised. Immutable once made; movable.
class CpuMatrix {
 public:
  CpuMatrix() = default;

  uint32_t num_rows() const { return num_rows_; }
  // Whether any of it stays quantised.
  bool quantized() const;

  // Adds the views' rows, one below the other; all have `num_cols` columns.
  // With `fast`, rows that the kernels can hold quantised stay so.
  absl::Status Append(std::span<const TensorView> views, bool fast,
                      cpu::Kernels& kernels);

  // As Kernels::Gemm and Kernels::LookUp.
  void Multiply(cpu::Kernels& kernels, const float* a, size_t a_stride,
                size_t num_rows, float* c, size_t c_stride,
                const cpu::GemmExtras& extras = {}) const;
  // REQUIRES: rows of one kind.
  void LookUp(cpu::Kernels& kernels, std::span<const int32_t> ids, float* out,
              size_t out_stride) const;

 private:
  using Part = std::variant<cpu::PackedMatrix, cpu::QuantizedMatrix>;
  absl::Status AppendPart(std::span<const TensorView> views, bool fast,
                          cpu::Kernels& kernels);

  uint32_t num_rows_ = 0;
  std::vector<Part> parts_;
};

}  // namespace promptcache::worker
