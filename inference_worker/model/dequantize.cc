#include <bit>
#include <cstring>

#include "common/float_types.h"
#include "glog/logging.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_types.h"

// Blocks lie unaligned in the file (34, 18 and 20 bytes) and little endian.
static_assert(std::endian::native == std::endian::little);

namespace promptcache::worker {
namespace {

constexpr size_t kBlock = 32;

uint16_t LoadU16(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

float LoadHalf(const std::byte* p) { return HalfToFloat(LoadU16(p)); }

// {half d; int8 q[32]}: x = d * q.
void DequantizeQ8_0(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kBlock; ++i) {
    const auto q = static_cast<int8_t>(block[2 + i]);
    out[i] = d * static_cast<float>(q);
  }
}

// {half d; uint4 q[32]}, low nibbles first: x = d * (q - 8).
void DequantizeQ4_0(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kBlock / 2; ++i) {
    const auto pair = std::to_integer<int>(block[2 + i]);
    out[i] = d * static_cast<float>((pair & 0xF) - 8);
    out[i + kBlock / 2] = d * static_cast<float>((pair >> 4) - 8);
  }
}

// {half d; half m; uint4 q[32]}, low nibbles first: x = d * q + m.
void DequantizeQ4_1(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const float m = LoadHalf(block + 2);
  for (size_t i = 0; i < kBlock / 2; ++i) {
    const auto pair = std::to_integer<int>(block[4 + i]);
    out[i] = d * static_cast<float>(pair & 0xF) + m;
    out[i + kBlock / 2] = d * static_cast<float>(pair >> 4) + m;
  }
}

}  // namespace

void DequantizeRow(const TensorView& view, uint64_t row, std::span<float> out) {
  CHECK_LT(row, view.rows) << view.name;
  CHECK_EQ(out.size(), view.cols) << view.name;
  const TensorTypeInfo& info = InfoOf(view.type);
  const size_t row_bytes = view.cols / info.block_elements * info.block_bytes;
  const std::byte* in = view.data.subspan(row * row_bytes, row_bytes).data();
  switch (view.type) {
    case TensorType::kF32:
      std::memcpy(out.data(), in, row_bytes);
      return;
    case TensorType::kF16:
      for (size_t i = 0; i < out.size(); ++i) out[i] = LoadHalf(in + 2 * i);
      return;
    case TensorType::kBf16:
      for (size_t i = 0; i < out.size(); ++i) {
        out[i] = Bf16ToFloat(LoadU16(in + 2 * i));
      }
      return;
    case TensorType::kQ8_0:
    case TensorType::kQ4_0:
    case TensorType::kQ4_1:
      break;
  }
  const auto dequantize = view.type == TensorType::kQ8_0   ? DequantizeQ8_0
                          : view.type == TensorType::kQ4_0 ? DequantizeQ4_0
                                                           : DequantizeQ4_1;
  for (size_t i = 0; i < out.size(); i += kBlock, in += info.block_bytes) {
    dequantize(in, out.data() + i);
  }
}

}  // namespace promptcache::worker
