#include <bit>
#include <cstring>

#include "common/float_types.h"
#include "glog/logging.h"
#include "inference_worker/model/dequantize_blocks.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_types.h"

// Elements lie unaligned in the file and little endian.
static_assert(std::endian::native == std::endian::little);

namespace promptcache::worker {
namespace {

uint16_t LoadU16(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

float LoadHalf(const std::byte* p) { return HalfToFloat(LoadU16(p)); }

// Where row (of a vector: element) `index` of the view lies.
uint64_t Place(const TensorView& view, uint64_t index) {
  if (view.run == 0) return index;
  return index / view.run * view.run_stride + index % view.run;
}

float LoadElement(const TensorView& view, uint64_t index) {
  const size_t bytes = InfoOf(view.type).block_bytes;
  const std::byte* in = view.data.subspan(index * bytes, bytes).data();
  switch (view.type) {
    case TensorType::kF16:
      return LoadHalf(in);
    case TensorType::kBf16:
      return Bf16ToFloat(LoadU16(in));
    default: {
      CHECK(view.type == TensorType::kF32) << view.name;
      float value;
      std::memcpy(&value, in, sizeof(value));
      return value;
    }
  }
}

// A row whose elements lie apart.
void GatherRow(const TensorView& view, uint64_t row, std::span<float> out) {
  const uint64_t first = view.column_stride == 0 ? 0 : Place(view, row);
  for (uint64_t i = 0; i < out.size(); ++i) {
    const uint64_t index = view.column_stride == 0
                               ? Place(view, i)
                               : first + i * view.column_stride;
    out[i] = LoadElement(view, index);
  }
}

}  // namespace

void DequantizeRow(const TensorView& view, uint64_t row, std::span<float> out) {
  CHECK_LT(row, view.rows) << view.name;
  CHECK_EQ(out.size(), view.cols) << view.name;
  const bool vector_in_runs = view.rows == 1 && view.run != 0;
  if (view.column_stride != 0 || vector_in_runs) {
    return GatherRow(view, row, out);
  }
  const TensorTypeInfo& info = InfoOf(view.type);
  const std::span<const std::byte> bytes = RowBytes(view, row);
  const std::byte* in = bytes.data();
  switch (view.type) {
    case TensorType::kF32:
      std::memcpy(out.data(), in, bytes.size());
      return;
    case TensorType::kF16:
      for (size_t i = 0; i < out.size(); ++i) out[i] = LoadHalf(in + 2 * i);
      return;
    case TensorType::kBf16:
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = Bf16ToFloat(LoadU16(in + 2 * i));
      }
      return;
    default:
      break;
  }
  const DequantizeBlock dequantize = DequantizeBlockOf(view.type);
  for (size_t i = 0; i < out.size(); i += info.block_elements) {
    dequantize(in, out.data() + i);
    in += info.block_bytes;
  }
}

}  // namespace promptcache::worker
