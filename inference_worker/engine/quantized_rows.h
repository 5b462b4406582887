#pragma once

#include <cstdint>
#include <optional>

#include "inference_worker/cpu/quantized_matrix.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// How the kernels hold a type's weights, unchanged but for the scales of Q4_K
// and Q6_K, which are rounded to fp16; empty where they cannot.
std::optional<cpu::QuantFormat> QuantFormatOf(TensorType type);

// Row `row` as that format has it. REQUIRES: QuantFormatOf(view.type) has a
// value; row < view.rows.
void ReadQuantizedRow(const TensorView& view, uint64_t row,
                      const cpu::QuantizedMatrix::Row& out);

}  // namespace promptcache::worker
