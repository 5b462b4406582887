#include "inference_worker/engine/quantized_rows.h"

#include <cstddef>
#include <cstring>

#include "common/float_types.h"
#include "glog/logging.h"
#include "inference_worker/model/dequantize_blocks.h"
#include "inference_worker/model/tensor_types.h"

namespace promptcache::worker {
namespace {

constexpr size_t kRuns = 8;  // of a block of 256
constexpr size_t kHalf = cpu::kQuantDepth / 2;

uint8_t Byte(const std::byte* p, size_t i) {
  return std::to_integer<uint8_t>(p[i]);
}

float LoadHalf(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return HalfToFloat(bits);
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

// Blocks of 256: their runs' scales are rounded to fp16, 2^-12 of them at most.

void ReadQ4K(const std::byte* block, uint8_t* codes, uint16_t* scales,
             uint16_t* minima) {
  const float d = LoadHalf(block);
  const float dmin = LoadHalf(block + 2);
  for (size_t run = 0; run < kRuns; ++run) {
    const RunScale packed(block + 4, run);
    scales[run] = FloatToHalf(d * static_cast<float>(packed.scale));
    minima[run] = FloatToHalf(-dmin * static_cast<float>(packed.minimum));
    const std::byte* const pairs = block + 16 + run / 2 * cpu::kQuantDepth;
    for (size_t i = 0; i < cpu::kQuantDepth; ++i) {
      const int pair = Byte(pairs, i);
      *codes++ = static_cast<uint8_t>(pair >> (run % 2 * 4) & 0xF);
    }
  }
}

// A scale for each 16.
void ReadQ6K(const std::byte* block, uint8_t* codes, uint16_t* scales) {
  const float d = LoadHalf(block + 208);
  for (size_t i = 0; i < 2 * kRuns; ++i) {
    const auto scale = static_cast<int8_t>(block[192 + i]);
    scales[i] = FloatToHalf(d * static_cast<float>(scale));
  }
  for (size_t i = 0; i < kRuns * cpu::kQuantDepth; ++i) {
    const size_t part = i / 128;
    const size_t in = i % 128;
    const int low = Byte(block, part * 64 + in % 64) >> (in / 64 * 4) & 0xF;
    const int high =
        Byte(block, 128 + part * 32 + in % 32) >> (in / 32 * 2) & 3;
    codes[i] = static_cast<uint8_t>((low | high << 4) - 32 + 128);
  }
}

}  // namespace

std::optional<cpu::QuantFormat> QuantFormatOf(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0:
      return cpu::QuantFormat::kNibbles;
    case TensorType::kQ4_1:
    case TensorType::kQ4_K:
      return cpu::QuantFormat::kNibblesMin;
    case TensorType::kQ5_0:
    case TensorType::kQ8_0:
      return cpu::QuantFormat::kBytes;
    case TensorType::kQ6_K:
      return cpu::QuantFormat::kByteHalves;
    default:
      return std::nullopt;
  }
}

void ReadQuantizedRow(const TensorView& view, uint64_t row,
                      const cpu::QuantizedMatrix::Row& out) {
  const TensorTypeInfo& info = InfoOf(view.type);
  const std::byte* block = RowBytes(view, row).data();
  if (info.block_elements == kRuns * cpu::kQuantDepth) {
    for (size_t run = 0; run < out.minima.size(); run += kRuns) {
      uint8_t* const codes = &out.codes[run * cpu::kQuantDepth];
      if (view.type == TensorType::kQ4_K) {
        ReadQ4K(block, codes, &out.scales[run], &out.minima[run]);
      } else {
        ReadQ6K(block, codes, &out.scales[2 * run]);
      }
      block += info.block_bytes;
    }
    return;
  }
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
