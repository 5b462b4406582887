#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/model/tensor_types.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

// The value of binary16 bits by the definition: no bit tricks.
double HalfByDefinition(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

uint16_t U16(const std::string& bytes, size_t at) {
  return static_cast<uint16_t>(static_cast<uint8_t>(bytes[at]) |
                               static_cast<uint8_t>(bytes[at + 1]) << 8);
}

int Nibble(const std::string& bytes, size_t quants, size_t i) {
  const int pair = static_cast<uint8_t>(bytes[quants + i % 16]);
  return i < 16 ? pair % 16 : pair / 16;
}

// Element `i` of a row by the formats' definitions, in double.
double Reference(TensorType type, const std::string& bytes, size_t i) {
  const size_t b = i / 32;
  const size_t j = i % 32;
  switch (type) {
    case TensorType::kF32: {
      float value;
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    case TensorType::kF16:
      return HalfByDefinition(U16(bytes, 2 * i));
    case TensorType::kBf16: {
      const uint16_t bits = U16(bytes, 2 * i);
      const double sign = bits & 0x8000 ? -1 : 1;
      const int exponent = bits >> 7 & 255;
      const int fraction = bits & 127;
      return exponent == 0 ? sign * std::ldexp(fraction, -133)
                           : sign * std::ldexp(128 + fraction, exponent - 134);
    }
    case TensorType::kQ8_0:
      return HalfByDefinition(U16(bytes, 34 * b)) *
             static_cast<int8_t>(bytes[34 * b + 2 + j]);
    case TensorType::kQ4_0:
      return HalfByDefinition(U16(bytes, 18 * b)) *
             (Nibble(bytes, 18 * b + 2, j) - 8);
    case TensorType::kQ4_1:
      return HalfByDefinition(U16(bytes, 20 * b)) *
                 Nibble(bytes, 20 * b + 4, j) +
             HalfByDefinition(U16(bytes, 20 * b + 2));
    default:
      ADD_FAILURE() << TensorTypeName(type);
  }
  return 0;
}

struct TypeCase {
  TensorType type;
  size_t block_bytes;     // of 32 elements
  double relative_error;  // of what EncodeTensor makes, of the largest value
};

class DequantizeTest : public ::testing::TestWithParam<TypeCase> {};

TEST_P(DequantizeTest, FollowsTheFormatForRandomBits) {
  std::mt19937 random(7);
  constexpr size_t kCols = 96;
  constexpr size_t kRows = 50;
  std::string bytes(GetParam().block_bytes * kCols / 32 * kRows, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  const TensorView view{
      .name = "t",
      .type = GetParam().type,
      .rows = kRows,
      .cols = kCols,
      .data = std::as_bytes(std::span(bytes.data(), bytes.size()))};
  std::vector<float> out(kCols);
  for (size_t row = 0; row < kRows; ++row) {
    DequantizeRow(view, row, out);
    const std::string row_bytes = bytes.substr(row * bytes.size() / kRows);
    for (size_t i = 0; i < kCols; ++i) {
      const double expected = Reference(GetParam().type, row_bytes, i);
      if (!std::isfinite(expected) || !std::isfinite(out[i])) {
        continue;  // exponents of ones: not values a format defines
      }
      // One product of a half and a small integer is exact in float; Q4_1's
      // sum of product (at most 15 of the largest half) and minimum rounds.
      const double allowed = GetParam().type == TensorType::kQ4_1 ? 0.0625 : 0;
      ASSERT_NEAR(out[i], expected, allowed) << row << ", " << i;
    }
  }
}

TEST_P(DequantizeTest, GivesBackWhatWasEncoded) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
  std::vector<float> values(160);
  for (float& v : values) v = uniform(random);
  const std::string bytes = EncodeTensor(GetParam().type, values);
  const TensorView view{
      .name = "t",
      .type = GetParam().type,
      .rows = 1,
      .cols = values.size(),
      .data = std::as_bytes(std::span(bytes.data(), bytes.size()))};
  std::vector<float> out(values.size());
  DequantizeRow(view, 0, out);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(out[i], values[i], 2 * GetParam().relative_error) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types, DequantizeTest,
    ::testing::Values(TypeCase{TensorType::kF32, 128, 0},
                      TypeCase{TensorType::kF16, 64, 0x1p-11},
                      TypeCase{TensorType::kBf16, 64, 0x1p-8},
                      TypeCase{TensorType::kQ8_0, 34, 0.5 / 127 * 1.1},
                      TypeCase{TensorType::kQ4_0, 18, 1.0 / 8 * 1.1},
                      TypeCase{TensorType::kQ4_1, 20, 1.0 / 15 * 1.1}),
    [](const auto& param_info) {
      return std::string(TensorTypeName(param_info.param.type));
    });

TEST(DequantizeKnownValuesTest, Q4_1) {
  // d = 0.5, m = -1; nibbles 0..15 low, 15..0 high.
  std::string bytes("\x00\x38\x00\xBC", 4);
  for (int i = 0; i < 16; ++i) {
    bytes.push_back(static_cast<char>(i | (15 - i) << 4));
  }
  const TensorView view{
      .name = "t",
      .type = TensorType::kQ4_1,
      .rows = 1,
      .cols = 32,
      .data = std::as_bytes(std::span(bytes.data(), bytes.size()))};
  std::vector<float> out(32);
  DequantizeRow(view, 0, out);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(out[static_cast<size_t>(i)], 0.5f * static_cast<float>(i) - 1);
    EXPECT_EQ(out[static_cast<size_t>(i) + 16],
              0.5f * static_cast<float>(15 - i) - 1);
  }
}

TEST(FloatTypesTest, AllHalfsBecomeTheirValuesAndComeBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const double expected = HalfByDefinition(half);
    const float got = HalfToFloat(half);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(HalfToFloat(FloatToHalf(got)))) << bits;
      continue;
    }
    ASSERT_EQ(got, expected) << bits;
    ASSERT_EQ(FloatToHalf(got), half);
  }
}

TEST(FloatTypesTest, FloatToHalfRoundsToTheNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const auto low = static_cast<uint16_t>(bits);
    const float a = HalfToFloat(low);
    const float b = HalfToFloat(static_cast<uint16_t>(bits + 1));
    const float middle = (a + b) / 2;  // exact: a float has bits to spare
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(FloatToHalf(middle), even) << bits;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, a)), bits);
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, b)), bits + 1);
  }
  EXPECT_EQ(FloatToHalf(65519.996f), 0x7BFF);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7C00);
  EXPECT_EQ(FloatToHalf(-1e30f), 0xFC00);
}

TEST(FloatTypesTest, FloatToBf16RoundsToTheNearestTiesToEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3F80);
  EXPECT_EQ(FloatToBf16(1.0f + 0x1p-8f), 0x3F80);      // a tie, to even
  EXPECT_EQ(FloatToBf16(1.0f + 3 * 0x1p-8f), 0x3F82);  // a tie, to even
  EXPECT_EQ(FloatToBf16(1.0f + 0x1p-8f + 0x1p-20f), 0x3F81);
  EXPECT_EQ(FloatToBf16(-std::numeric_limits<float>::infinity()), 0xFF80);
  EXPECT_TRUE(std::isnan(
      Bf16ToFloat(FloatToBf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(Bf16ToFloat(0xC040), -3.0f);
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// Values of another implementation (tools/make_dequantize_vectors.py): the same
// products and sums in float, so the same bits.
TEST(DequantizeVectorsTest, EqualsTheGgufPackage) {
  const auto cases =
      nlohmann::json::parse(ReadFileOrDie(TestDataPath("dequantize.json")));
  size_t num_types = 0;
  for (const TensorTypeInfo& info : SupportedTensorTypes()) {
    for (const auto& c : cases) {
      if (c["type"] != info.name) continue;
      ++num_types;
      const std::string bytes = FromHex(c["blocks"]);
      const auto expected = c["values"].get<std::vector<float>>();
      ASSERT_EQ(bytes.size() / info.block_bytes * info.block_elements,
                expected.size());
      const TensorView view{
          .name = info.name,
          .type = info.type,
          .rows = 2,
          .cols = expected.size() / 2,
          .data = std::as_bytes(std::span(bytes.data(), bytes.size()))};
      std::vector<float> out(view.cols);
      for (uint64_t row = 0; row < 2; ++row) {
        DequantizeRow(view, row, out);
        for (size_t i = 0; i < out.size(); ++i) {
          ASSERT_EQ(out[i], expected[row * view.cols + i])
              << info.name << " row " << row << " element " << i;
        }
      }
    }
  }
  EXPECT_EQ(num_types, 11u);
}

}  // namespace
}  // namespace promptcache::worker
