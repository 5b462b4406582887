#include "inference_worker/engine/quantized_rows.h"

#include <cstddef>
#include <cstring>

#include "glog/logging.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

constexpr size_t kHalf = cpu::kQuantDepth / 2;

uint8_t Byte(const std::byte* p, size_t i) {
  return std::to_integer<uint8_t>(p[i]);
}

// Elements 0 to 15 in the low and 16 to 31 in the high halves.
void ReadNibbles(const std::byte* nibbles, uint8_t* codes) {
  for (size_t i = 0; i < kHalf; ++i) {
    codes[i] = Byte(nibbles, i) & 0xF;
    codes[i + kHalf] = static_cast<uint8_t>(Byte(nibbles, i) >> 4);
  }
}

// The codes of one block, whose scale and minimum have been read. As
// model/dequantize_blocks.cc describes the types.
void ReadCodes(TensorType type, const std::byte* block, uint8_t* codes) {
  switch (type) {
    case TensorType::kQ4_0:
      return ReadNibbles(block + 2, codes);
    case TensorType::kQ4_1:
      return ReadNibbles(block + 4, codes);
    case TensorType::kQ8_0:
      for (size_t i = 0; i < cpu::kQuantDepth; ++i) {
        codes[i] = Byte(block, 2 + i) ^ 0x80;
      }
      return;
    case TensorType::kQ5_0: {
      uint32_t fifth;
      std::memcpy(&fifth, block + 2, sizeof(fifth));
      ReadNibbles(block + 6, codes);
      for (size_t i = 0; i < cpu::kQuantDepth; ++i) {
        const uint32_t code = codes[i] | (fifth >> i & 1) << 4;
        codes[i] = static_cast<uint8_t>(code + 128 - 16);
      }
      return;
    }
    default:
      LOG(FATAL) << TensorTypeName(type);
  }
}

}  // namespace

std::optional<cpu::QuantFormat> QuantFormatOf(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0:
      return cpu::QuantFormat::kNibbles;
    case TensorType::kQ4_1:
      return cpu::QuantFormat::kNibblesMin;
    case TensorType::kQ5_0:
    case TensorType::kQ8_0:
      return cpu::QuantFormat::kBytes;
    default:
      return std::nullopt;
  }
}

void ReadQuantizedRow(const TensorView& view, uint64_t row,
                      const cpu::QuantizedMatrix::Row& out) {
  const TensorTypeInfo& info = InfoOf(view.type);
  const std::byte* block = RowBytes(view, row).data();
  for (size_t b = 0; b < out.scales.size(); ++b) {
    std::memcpy(&out.scales[b], block, sizeof(uint16_t));
    if (view.type == TensorType::kQ4_1) {
      std::memcpy(&out.minima[b], block + 2, sizeof(uint16_t));
    }
    ReadCodes(view.type, block, &out.codes[b * cpu::kQuantDepth]);
    block += info.block_bytes;
  }
}

}  // namespace promptcache::worker
