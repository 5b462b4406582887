#include "inference_worker/engine/cpu_matrix.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/engine/quantized_rows.h"

namespace promptcache::worker {
namespace {

std::optional<cpu::QuantFormat> FormatOf(const TensorView& view, bool fast) {
  return fast ? QuantFormatOf(view.type) : std::nullopt;
}

// The view that holds a row of views one below the other; `row` becomes the
// row in it.
const TensorView& ViewOf(std::span<const TensorView> views, uint64_t* row) {
  size_t i = 0;
  while (*row >= views[i].rows) *row -= views[i++].rows;
  return views[i];
}

}  // namespace

bool CpuMatrix::quantized() const {
  return std::ranges::any_of(parts_, [](const Part& part) {
    return std::holds_alternative<cpu::QuantizedMatrix>(part);
  });
}

absl::Status CpuMatrix::Append(std::span<const TensorView> views, bool fast,
                               cpu::Kernels& kernels) {
  // Views of one format become one part: fewer, longer products.
  while (!views.empty()) {
    size_t count = 1;
    while (count < views.size() &&
           FormatOf(views[count], fast) == FormatOf(views[0], fast)) {
      ++count;
    }
    PC_RETURN_IF_ERROR(AppendPart(views.first(count), fast, kernels));
    views = views.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status CpuMatrix::AppendPart(std::span<const TensorView> views, bool fast,
                                   cpu::Kernels& kernels) {
  uint64_t num_rows = 0;
  for (const TensorView& view : views) num_rows += view.rows;
  const auto rows = static_cast<uint32_t>(num_rows);
  const auto cols = static_cast<uint32_t>(views[0].cols);
  if (const auto format = FormatOf(views[0], fast)) {
    PC_ASSIGN_OR_RETURN(
        cpu::QuantizedMatrix matrix,
        kernels.PackQuantized(
            rows, cols, *format,
            [views](uint64_t row, const cpu::QuantizedMatrix::Row& out) {
              const TensorView& view = ViewOf(views, &row);
              ReadQuantizedRow(view, row, out);
            }));
    parts_.emplace_back(std::move(matrix));
  } else {
    PC_ASSIGN_OR_RETURN(
        cpu::PackedMatrix matrix,
        kernels.Pack(rows, cols, [views](uint64_t row, std::span<float> out) {
          const TensorView& view = ViewOf(views, &row);
          DequantizeRow(view, row, out);
        }));
    parts_.emplace_back(std::move(matrix));
  }
  num_rows_ += rows;
  return absl::OkStatus();
}

void CpuMatrix::Multiply(cpu::Kernels& kernels, const float* a, size_t a_stride,
                         size_t num_rows, float* c, size_t c_stride,
                         const cpu::GemmExtras& extras) const {
  cpu::GemmExtras part_extras = extras;
  for (const Part& part : parts_) {
    const uint32_t columns = std::visit(
        [&](const auto& weights) {
          kernels.Gemm(a, a_stride, num_rows, weights, c, c_stride,
                       part_extras);
          return weights.num_rows();
        },
        part);
    c += columns;
    if (part_extras.bias != nullptr) part_extras.bias += columns;
    if (part_extras.residual != nullptr) part_extras.residual += columns;
  }
}

void CpuMatrix::LookUp(cpu::Kernels& kernels, std::span<const int32_t> ids,
                       float* out, size_t out_stride) const {
  CHECK_EQ(parts_.size(), 1u);
  std::visit(
      [&](const auto& table) { kernels.LookUp(table, ids, out, out_stride); },
      parts_[0]);
}

}  // namespace promptcache::worker
