#include "inference_worker/engine/cpu_matrix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "inference_worker/engine/quantized_rows.h"
#include "inference_worker/model/tensor_types.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

constexpr uint64_t kCols = 256;

// A matrix of a type as a file has it.
struct Encoded {
  std::string bytes;
  TensorView view;
};

Encoded Encode(TensorType type, uint64_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.02f, 0.1f);
  std::vector<float> values(rows * kCols);
  for (float& value : values) value = normal(random);
  Encoded encoded = {.bytes = EncodeTensor(type, values)};
  encoded.view = {.name = "matrix", .type = type, .rows = rows, .cols = kCols};
  return encoded;
}

// Any bytes are a matrix, with scales (and minima) below 0.5.
Encoded RandomBlocks(TensorType type, uint64_t rows) {
  const size_t block_bytes = InfoOf(type).block_bytes;
  std::mt19937 random(7);
  Encoded encoded;
  encoded.bytes.resize(rows * kCols / InfoOf(type).block_elements *
                       block_bytes);
  for (char& byte : encoded.bytes) byte = static_cast<char>(random());
  const bool scale_last = type == TensorType::kQ6_K;
  for (size_t block = 0; block < encoded.bytes.size(); block += block_bytes) {
    const size_t first = block + (scale_last ? block_bytes - 2 : 0);
    for (const size_t high : {first + 1, scale_last ? first + 1 : first + 3}) {
      encoded.bytes[high] = static_cast<char>(encoded.bytes[high] & 0xb7);
    }
  }
  encoded.view = {.name = "matrix", .type = type, .rows = rows, .cols = kCols};
  return encoded;
}

TensorView ViewOf(const Encoded& encoded) {
  TensorView view = encoded.view;
  view.data = std::as_bytes(std::span(encoded.bytes));
  return view;
}

std::vector<float> Row(const TensorView& view, uint64_t row) {
  std::vector<float> values(view.cols);
  DequantizeRow(view, row, values);
  return values;
}

std::unique_ptr<cpu::Kernels> MakeKernels() {
  auto kernels = cpu::Kernels::Create({.num_threads = 2});
  PC_EXPECT_OK(kernels);
  return *std::move(kernels);
}

class QuantizedTypeTest : public ::testing::TestWithParam<TensorType> {};

TEST_P(QuantizedTypeTest, RowsKeepTheirValues) {
  ASSERT_TRUE(QuantFormatOf(GetParam()).has_value());
  const bool rounds_scales =
      GetParam() == TensorType::kQ4_K || GetParam() == TensorType::kQ6_K;
  const Encoded encoded = RandomBlocks(GetParam(), 40);
  TensorView view = ViewOf(encoded);
  const auto kernels = MakeKernels();
  for (const uint64_t run : {0, 5}) {
    // Rows in runs: every other five.
    view.run = run;
    view.run_stride = 2 * run;
    view.rows = run == 0 ? 40 : 20;
    CpuMatrix matrix;
    PC_ASSERT_OK(matrix.Append({&view, 1}, /*fast=*/true, *kernels));
    EXPECT_TRUE(matrix.quantized());
    for (int32_t row = 0; row < static_cast<int32_t>(view.rows); ++row) {
      std::vector<float> out(kCols);
      matrix.LookUp(*kernels, {&row, 1}, out.data(), kCols);
      const std::vector<float> want = Row(view, static_cast<uint64_t>(row));
      // Of scales up to 0.5 times 127, times 128 codes.
      const double rounding = rounds_scales ? 0.5 * 127 * 128 / 4096 : 0;
      for (size_t i = 0; i < kCols; ++i) {
        ASSERT_NEAR(out[i], want[i], 1e-6 * std::abs(want[i]) + rounding);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types, QuantizedTypeTest,
    ::testing::Values(TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ4_K,
                      TensorType::kQ5_0, TensorType::kQ6_K, TensorType::kQ8_0),
    [](const auto& test) { return std::string(TensorTypeName(test.param)); });

TEST(CpuMatrixTest, OtherTypesAndExactAreRoundedToBf16) {
  const auto kernels = MakeKernels();
  for (const auto& [type, fast] : std::vector<std::pair<TensorType, bool>>{
           {TensorType::kF32, true}, {TensorType::kQ4_1, false}}) {
    const Encoded encoded = Encode(type, 3, 2);
    const TensorView view = ViewOf(encoded);
    CpuMatrix matrix;
    PC_ASSERT_OK(matrix.Append({&view, 1}, fast, *kernels));
    EXPECT_FALSE(matrix.quantized());
    const int32_t row = 2;
    std::vector<float> out(kCols);
    matrix.LookUp(*kernels, {&row, 1}, out.data(), kCols);
    EXPECT_EQ(out[5], cpu::FromBf16(cpu::ToBf16(Row(view, 2)[5])));
  }
}

// q, k and v of a file may be of different types.
TEST(CpuMatrixTest, MultipliesPartsOfDifferentTypes) {
  const auto kernels = MakeKernels();
  const Encoded encoded[] = {
      Encode(TensorType::kQ4_1, 20, 3), Encode(TensorType::kQ4_1, 7, 4),
      Encode(TensorType::kF32, 9, 5), Encode(TensorType::kQ8_0, 18, 6)};
  std::vector<TensorView> views;
  std::vector<std::vector<float>> rows;
  for (const Encoded& e : encoded) {
    views.push_back(ViewOf(e));
    for (uint64_t i = 0; i < e.view.rows; ++i) {
      rows.push_back(Row(views.back(), i));
    }
  }
  CpuMatrix matrix;
  PC_ASSERT_OK(matrix.Append(views, /*fast=*/true, *kernels));
  ASSERT_EQ(matrix.num_rows(), 54u);
  std::vector<float> bias(54);
  std::vector<float> a(2 * kCols);
  for (size_t i = 0; i < 54; ++i) bias[i] = static_cast<float>(i);
  for (size_t i = 0; i < a.size(); ++i) a[i] = std::sin(static_cast<float>(i));
  std::vector<float> c(2 * 60, 1000.0f);
  matrix.Multiply(*kernels, a.data(), kCols, 2, c.data(), 60,
                  {.bias = bias.data(), .residual = c.data()});
  for (size_t row = 0; row < 2; ++row) {
    for (size_t col = 0; col < 54; ++col) {
      double want = 1000.0 + bias[col];
      for (size_t i = 0; i < kCols; ++i) {
        want += double{a[row * kCols + i]} * rows[col][i];
      }
      // Of sums of 256 products of about 0.07.
      ASSERT_NEAR(c[row * 60 + col], want, 0.03) << row << "," << col;
    }
    EXPECT_EQ(c[row * 60 + 54], 1000.0f);
  }
}

}  // namespace
}  // namespace promptcache::worker
