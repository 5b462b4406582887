#pragma once

#include <cstddef>
#include <cstdint>

namespace promptcache::worker::cpu {

// How a quantised weight is coded: value = scale * (code - zero) + minimum,
// scale and minimum (where there is one) as fp16 for each block of
// kQuantDepth weights of a row, or a scale for each half of one. The codes are
// unsigned, as vpdpbusd wants its first operand.
enum class QuantFormat {
  kNibbles,     // codes of 4 bits, zero 8
  kNibblesMin,  // codes of 4 bits, zero 0, a minimum
  kBytes,       // codes of 8 bits, zero 128
  kByteHalves,  // the same, two scales a block
};
inline constexpr uint32_t kNumQuantFormats = 4;

inline constexpr uint32_t kQuantDepth = 32;  // weights of a row in a block
inline constexpr uint32_t kQuantCols = 16;   // rows of the matrix in a panel

constexpr bool HasNibbles(QuantFormat format) {
  return format == QuantFormat::kNibbles || format == QuantFormat::kNibblesMin;
}
constexpr bool HasMinimum(QuantFormat format) {
  return format == QuantFormat::kNibblesMin;
}
constexpr int32_t ZeroCode(QuantFormat format) {
  return HasMinimum(format) ? 0 : HasNibbles(format) ? 8 : 128;
}
// Parts of a block that have scales of their own.
constexpr uint32_t ScaleParts(QuantFormat format) {
  return format == QuantFormat::kByteHalves ? 2 : 1;
}

// A panel is one block after another, each its codes, then its columns' scales
// (of each half), then their minima where there are any. Codes are lines of 64
// bytes, 4 bytes a column: of bytes, line l holds depths 4 l to 4 l + 3; of
// nibbles, depths 8 l to 8 l + 3 in the low and 8 l + 4 to 8 l + 7 in the high
// halves.
constexpr size_t CodeBytes(QuantFormat format) {
  return size_t{kQuantDepth} * kQuantCols / (HasNibbles(format) ? 2 : 1);
}
constexpr size_t ScaleBytes(QuantFormat format) {
  return size_t{kQuantCols} * sizeof(uint16_t) *
         (HasMinimum(format) ? 2 : ScaleParts(format));
}
constexpr size_t QuantBlockBytes(QuantFormat format) {
  return CodeBytes(format) + ScaleBytes(format);
}
constexpr size_t QuantPanelBytes(QuantFormat format, uint32_t num_blocks) {
  const size_t bytes = num_blocks * QuantBlockBytes(format);
  return (bytes + 63) / 64 * 64;
}

}  // namespace promptcache::worker::cpu
