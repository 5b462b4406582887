#include "inference_worker/model/dequantize_blocks.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "common/float_types.h"

// Blocks lie unaligned in the file and little endian.
static_assert(std::endian::native == std::endian::little);

namespace promptcache::worker {
namespace {

constexpr size_t kBlock = 32;
constexpr size_t kHalf = kBlock / 2;

float LoadHalf(const std::byte* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return HalfToFloat(bits);
}

int Byte(const std::byte* p, size_t i) { return std::to_integer<int>(p[i]); }
int Bit(int value, size_t bit) { return value >> bit & 1; }

// Blocks of 32. `d` and `m` are halves; nibbles hold elements 0 to 15 in their
// low and 16 to 31 in their high halves.

// {d; int8 q[32]}: x = d * q.
void DequantizeQ8_0(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kBlock; ++i) {
    const auto q = static_cast<int8_t>(block[2 + i]);
    out[i] = d * static_cast<float>(q);
  }
}

// {d; uint4 q[32]}: x = d * (q - 8).
void DequantizeQ4_0(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kHalf; ++i) {
    const int pair = Byte(block, 2 + i);
    out[i] = d * static_cast<float>((pair & 0xF) - 8);
    out[i + kHalf] = d * static_cast<float>((pair >> 4) - 8);
  }
}

// {d; m; uint4 q[32]}: x = d * q + m.
void DequantizeQ4_1(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const float m = LoadHalf(block + 2);
  for (size_t i = 0; i < kHalf; ++i) {
    const int pair = Byte(block, 4 + i);
    out[i] = d * static_cast<float>(pair & 0xF) + m;
    out[i + kHalf] = d * static_cast<float>(pair >> 4) + m;
  }
}

// The fifth bits of 32 elements, then their nibbles.
struct FiveBits {
  explicit FiveBits(const std::byte* p) : nibbles(p + 4) {
    std::memcpy(&high, p, sizeof(high));
  }
  int low_half(size_t i) const {
    return (Byte(nibbles, i) & 0xF) | static_cast<int>(high >> i & 1) << 4;
  }
  int high_half(size_t i) const {
    return Byte(nibbles, i) >> 4 | static_cast<int>(high >> (i + kHalf) & 1)
                                       << 4;
  }
  uint32_t high = 0;
  const std::byte* nibbles;
};

// {d; bits[4]; uint4 q[32]}: x = d * (q - 16).
void DequantizeQ5_0(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const FiveBits q(block + 2);
  for (size_t i = 0; i < kHalf; ++i) {
    out[i] = d * static_cast<float>(q.low_half(i) - 16);
    out[i + kHalf] = d * static_cast<float>(q.high_half(i) - 16);
  }
}

// {d; m; bits[4]; uint4 q[32]}: x = d * q + m.
void DequantizeQ5_1(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const float m = LoadHalf(block + 2);
  const FiveBits q(block + 4);
  for (size_t i = 0; i < kHalf; ++i) {
    out[i] = d * static_cast<float>(q.low_half(i)) + m;
    out[i + kHalf] = d * static_cast<float>(q.high_half(i)) + m;
  }
}

// {d; uint4 q[32]}: x = d * level[q].
void DequantizeIq4Nl(const std::byte* block, float* out) {
  constexpr std::array<float, 16> kLevels = {
      -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  const float d = LoadHalf(block);
  for (size_t i = 0; i < kHalf; ++i) {
    const auto pair = std::to_integer<size_t>(block[2 + i]);
    out[i] = d * kLevels[pair & 0xF];
    out[i + kHalf] = d * kLevels[pair >> 4];
  }
}

// Blocks of 256, in which smaller ones have scales of their own.

// {scale and minimum, a nibble each, of 16 elements [16]; uint2 q[256]; d;
// dmin}. Byte i of each 32 holds elements i, i + 32, i + 64, i + 96 of 128.
void DequantizeQ2_K(const std::byte* block, float* out) {
  const std::byte* q = block + 16;
  const float d = LoadHalf(block + 80);
  const float dmin = LoadHalf(block + 82);
  for (size_t i = 0; i < 256; ++i) {
    const int scales = Byte(block, i / 16);
    const size_t part = i / 128;
    const int value = Byte(q, part * 32 + i % 32) >> (i % 128 / 32 * 2) & 3;
    const float scale = d * static_cast<float>(scales & 0xF);
    const float minimum = dmin * static_cast<float>(scales >> 4);
    out[i] = scale * static_cast<float>(value) - minimum;
  }
}

// {third bits [32]; uint2 q[256] as in Q2_K; 16 scales of 6 bits [12]; d}: the
// third bit says that 4 is not subtracted; scales have an offset of 32.
void DequantizeQ3_K(const std::byte* block, float* out) {
  const std::byte* q = block + 32;
  const std::byte* packed = block + 96;
  const float d = LoadHalf(block + 108);
  std::array<float, 16> scales;
  for (size_t i = 0; i < scales.size(); ++i) {
    const int low = i < 8 ? Byte(packed, i) & 0xF : Byte(packed, i - 8) >> 4;
    const int high = Byte(packed, 8 + i % 4) >> (i / 4 * 2) & 3;
    scales[i] = d * static_cast<float>((low | high << 4) - 32);
  }
  for (size_t i = 0; i < 256; ++i) {
    const int low = Byte(q, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3;
    const int third = Bit(Byte(block, i % 32), i / 32);
    out[i] = scales[i / 16] * static_cast<float>(low + third * 4 - 4);
  }
}

// {d; dmin; scales[12]; uint4 q[256]}: x = d * scale * q - dmin * minimum. 32
// bytes hold two runs: low nibbles the first, high ones the second.
void DequantizeQ4_K(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const float dmin = LoadHalf(block + 2);
  for (size_t run = 0; run < 8; ++run) {
    const RunScale scales(block + 4, run);
    const float scale = d * static_cast<float>(scales.scale);
    const float minimum = dmin * static_cast<float>(scales.minimum);
    const std::byte* q = block + 16 + run / 2 * 32;
    for (size_t i = 0; i < 32; ++i) {
      const int value = Byte(q, i) >> (run % 2 * 4) & 0xF;
      out[run * 32 + i] = scale * static_cast<float>(value) - minimum;
    }
  }
}

// {d; dmin; scales[12]; fifth bits[32], bit r of byte i for element i of run r;
// uint4 q[256]}: as Q4_K.
void DequantizeQ5_K(const std::byte* block, float* out) {
  const float d = LoadHalf(block);
  const float dmin = LoadHalf(block + 2);
  const std::byte* fifth = block + 16;
  for (size_t run = 0; run < 8; ++run) {
    const RunScale scales(block + 4, run);
    const float scale = d * static_cast<float>(scales.scale);
    const float minimum = dmin * static_cast<float>(scales.minimum);
    const std::byte* q = block + 48 + run / 2 * 32;
    for (size_t i = 0; i < 32; ++i) {
      const int value =
          (Byte(q, i) >> (run % 2 * 4) & 0xF) | Bit(Byte(fifth, i), run) << 4;
      out[run * 32 + i] = scale * static_cast<float>(value) - minimum;
    }
  }
}

// {low nibbles [128]; high pairs [64]; int8 scales[16]; d}: x = d * scale *
// (q - 32). Of 128 elements: nibble bytes i hold i and i + 64, pair byte i
// holds i, i + 32, i + 64 and i + 96.
void DequantizeQ6_K(const std::byte* block, float* out) {
  const float d = LoadHalf(block + 208);
  for (size_t i = 0; i < 256; ++i) {
    const size_t part = i / 128;
    const size_t in = i % 128;
    const int low = Byte(block, part * 64 + in % 64) >> (in / 64 * 4) & 0xF;
    const int high =
        Byte(block, 128 + part * 32 + in % 32) >> (in / 32 * 2) & 3;
    const auto scale = static_cast<int8_t>(block[192 + i / 16]);
    out[i] = d * static_cast<float>(scale) *
             static_cast<float>((low | high << 4) - 32);
  }
}

}  // namespace

DequantizeBlock DequantizeBlockOf(TensorType type) {
  switch (type) {
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBf16:
      return nullptr;
    case TensorType::kQ8_0:
      return DequantizeQ8_0;
    case TensorType::kQ4_0:
      return DequantizeQ4_0;
    case TensorType::kQ4_1:
      return DequantizeQ4_1;
    case TensorType::kQ5_0:
      return DequantizeQ5_0;
    case TensorType::kQ5_1:
      return DequantizeQ5_1;
    case TensorType::kQ2_K:
      return DequantizeQ2_K;
    case TensorType::kQ3_K:
      return DequantizeQ3_K;
    case TensorType::kQ4_K:
      return DequantizeQ4_K;
    case TensorType::kQ5_K:
      return DequantizeQ5_K;
    case TensorType::kQ6_K:
      return DequantizeQ6_K;
    case TensorType::kIq4Nl:
      return DequantizeIq4Nl;
  }
  return nullptr;
}

}  // namespace promptcache::worker
