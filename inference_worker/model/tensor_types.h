#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// How a type lies in memory: rows are sequences of blocks.
struct TensorTypeInfo {
  TensorType type;
  const char* name;
  uint32_t gguf_id;
  uint32_t block_elements;
  uint32_t block_bytes;
};

// The types that can be computed with.
std::span<const TensorTypeInfo> SupportedTensorTypes();
const TensorTypeInfo& InfoOf(TensorType type);
const TensorTypeInfo* FindGgufTensorType(uint32_t gguf_id);  // or null
// F32, F16 or BF16 by name; null for any other.
const TensorTypeInfo* FindPlainTensorType(std::string_view name);

// "Q4_K (12)", for messages; also of types that are not supported.
std::string DescribeGgufTensorType(uint32_t gguf_id);
// "F32, F16, ...".
std::string SupportedTensorTypeNames();

// Bytes of `rows` rows of `cols` elements; empty when cols is not a multiple
// of the block or the result does not fit.
std::optional<uint64_t> TensorBytes(TensorType type, uint64_t rows,
                                    uint64_t cols);

// Where a row lies. REQUIRES: it lies in one piece (no column_stride, no vector
// in runs); row < view.rows.
std::span<const std::byte> RowBytes(const TensorView& view, uint64_t row);

}  // namespace promptcache::worker
