#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/float_types.h"
#include "tests/inference_worker/cpu/reference.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

// Random codes and scales, as the format allows them.
struct Weights {
  QuantFormat format;
  uint32_t n;
  uint32_t k;
  std::vector<uint8_t> codes;    // [n][k]
  std::vector<uint16_t> scales;  // [n][k / 32][parts]
  std::vector<uint16_t> minima;

  double Value(size_t row, size_t col) const {
    const size_t block = (row * k + col) / kQuantDepth;
    const double minimum =
        HasMinimum(format) ? HalfToFloat(minima[block]) : 0.0;
    const uint32_t parts = ScaleParts(format);
    const size_t part = (row * k + col) % kQuantDepth * parts / kQuantDepth;
    return double{HalfToFloat(scales[block * parts + part])} *
               (codes[row * k + col] - ZeroCode(format)) +
           minimum;
  }
};

Weights MakeWeights(QuantFormat format, uint32_t n, uint32_t k) {
  std::mt19937 random(n * 1000 + k);
  Weights weights = {.format = format, .n = n, .k = k};
  const uint32_t num_codes = HasNibbles(format) ? 16 : 256;
  for (size_t i = 0; i < size_t{n} * k; ++i) {
    // All of them, the ends often: sums of products must not saturate.
    const auto r = static_cast<uint32_t>(random());
    weights.codes.push_back(static_cast<uint8_t>(r % 8 == 0 ? 0
                                                 : r % 8 == 1
                                                     ? num_codes - 1
                                                     : r / 8 % num_codes));
  }
  std::normal_distribution<float> normal(0.0f, 0.01f);
  for (size_t i = 0; i < size_t{n} * k / kQuantDepth; ++i) {
    for (uint32_t part = 0; part < ScaleParts(format); ++part) {
      weights.scales.push_back(FloatToHalf(normal(random)));
    }
    weights.minima.push_back(FloatToHalf(normal(random)));
  }
  return weights;
}

QuantizedMatrix Pack(Kernels* kernels, const Weights& weights) {
  const size_t blocks = weights.k / kQuantDepth;
  auto packed = kernels->PackQuantized(
      weights.n, weights.k, weights.format,
      [&](uint64_t index, const QuantizedMatrix::Row& row) {
        std::copy_n(&weights.codes[index * weights.k], weights.k,
                    row.codes.begin());
        const size_t scales = blocks * ScaleParts(weights.format);
        ASSERT_EQ(row.scales.size(), scales);
        std::copy_n(&weights.scales[index * scales], scales,
                    row.scales.begin());
        std::copy_n(&weights.minima[index * blocks], blocks,
                    row.minima.begin());
      });
  CHECK(packed.ok()) << packed.status();
  return *std::move(packed);
}

// A row of activations as the kernels' contract has it: of each 32 the largest
// magnitude becomes 127; what is below 1e-30 is zero.
std::vector<double> Quantized(const float* a, uint32_t k) {
  std::vector<double> values(k);
  for (uint32_t first = 0; first < k; first += kQuantDepth) {
    float largest = 0;
    for (uint32_t i = 0; i < kQuantDepth; ++i) {
      largest = std::max(largest, std::abs(a[first + i]));
    }
    if (largest < 1e-30f) continue;
    const float scale = largest / 127.0f;
    const float inverse = 127.0f / largest;
    for (uint32_t i = 0; i < kQuantDepth; ++i) {
      values[first + i] =
          double{scale} * std::nearbyintf(a[first + i] * inverse);
    }
  }
  return values;
}

// fp32 sums of some dozens of blocks, relative to the magnitudes of what each
// block adds: an element's magnitude with its zero code.
constexpr double kTolerance = 1e-6;

class QuantizedGemmTest
    : public ::testing::TestWithParam<std::tuple<std::string, QuantFormat>> {
 protected:
  const std::string& kernels_name() const { return std::get<0>(GetParam()); }
  QuantFormat format() const { return std::get<1>(GetParam()); }
};

TEST_P(QuantizedGemmTest, MatchesTheQuantisedProductInDoublePrecision) {
  auto kernels = MakeKernels(kernels_name(), 2);
  for (const auto& [n, k] :
       std::vector<std::pair<uint32_t, uint32_t>>{{1, 32},
                                                  {15, 64},
                                                  {16, 96},
                                                  {17, 32},
                                                  {75, 160},
                                                  {192, 576},
                                                  {33, 1568}}) {
    const Weights weights = MakeWeights(format(), n, k);
    const QuantizedMatrix packed = Pack(kernels.get(), weights);
    // From 32 on whole tiles of 16, of 41 a filled one, of 37 rows beside.
    for (uint32_t m : {0u, 1u, 2u, 3u, 4u, 5u, 7u, 12u, 13u, 29u, 37u, 41u}) {
      const size_t a_stride = k + 3;
      const size_t c_stride = n + 5;
      std::vector<float> a = RandomFloats(m * a_stride + 1, m);
      // A block of zeros, and one of values that are nearly nothing.
      if (m > 1) std::fill_n(&a[a_stride], kQuantDepth, 0.0f);
      if (m > 2) std::fill_n(&a[2 * a_stride], kQuantDepth, 1e-35f);
      std::vector<float> c(m * c_stride, -77.0f);
      kernels->Gemm(a.data(), a_stride, m, packed, c.data(), c_stride);
      for (uint32_t row = 0; row < m; ++row) {
        const std::vector<double> x = Quantized(&a[row * a_stride], k);
        for (uint32_t col = 0; col < n; ++col) {
          double want = 0;
          double magnitude = 1e-30;
          for (uint32_t i = 0; i < k; ++i) {
            const double product = x[i] * weights.Value(col, i);
            want += product;
            magnitude += std::abs(product);
          }
          ASSERT_NEAR(c[row * c_stride + col], want, kTolerance * magnitude)
              << m << "x" << n << "x" << k << " at " << row << "," << col;
        }
        for (size_t col = n; col < c_stride; ++col) {
          ASSERT_EQ(c[row * c_stride + col], -77.0f) << "wrote beyond a row";
        }
      }
    }
  }
}

// Against the product with unquantised activations: an element's error is at
// most half a step, so that a sum's is about its root.
TEST_P(QuantizedGemmTest, IsNearTheFloatProduct) {
  auto kernels = MakeKernels(kernels_name(), 2);
  constexpr uint32_t kN = 64;
  constexpr uint32_t kK = 576;
  const Weights weights = MakeWeights(format(), kN, kK);
  const QuantizedMatrix packed = Pack(kernels.get(), weights);
  const std::vector<float> a = RandomFloats(kK, 5);
  std::vector<float> c(kN);
  kernels->Gemm(a.data(), kK, 1, packed, c.data(), kN);
  for (uint32_t col = 0; col < kN; ++col) {
    double want = 0;
    double squares = 0;
    for (uint32_t i = 0; i < kK; ++i) {
      const double w = weights.Value(col, i);
      want += a[i] * w;
      squares += w * w;
    }
    // Steps of about 2.2 / 127, errors spread evenly over one: a deviation of
    // 0.005 of an element of 1. Five of them.
    EXPECT_NEAR(c[col], want, 5 * 0.005 * std::sqrt(squares)) << col;
    EXPECT_NE(c[col], static_cast<float>(want)) << col;
  }
}

TEST_P(QuantizedGemmTest, AddsBiasThenResidualAlsoInPlace) {
  auto kernels = MakeKernels(kernels_name(), 2);
  const QuantizedMatrix packed =
      Pack(kernels.get(), MakeWeights(format(), 75, 64));
  const std::vector<float> bias = RandomFloats(75, 1);
  for (uint32_t m : {1u, 4u, 30u, 41u}) {
    const std::vector<float> a = RandomFloats(m * 64, 2);
    std::vector<float> plain(m * 75);
    kernels->Gemm(a.data(), 64, m, packed, plain.data(), 75);
    std::vector<float> c = RandomFloats(m * 75, 3);
    const std::vector<float> before = c;
    kernels->Gemm(a.data(), 64, m, packed, c.data(), 75,
                  {.bias = bias.data(), .residual = c.data()});
    for (size_t i = 0; i < c.size(); ++i) {
      ASSERT_EQ(c[i], plain[i] + bias[i % 75] + before[i]) << i;
    }
  }
}

TEST_P(QuantizedGemmTest, RowsDoNotDependOnOthersNorOnThreads) {
  constexpr uint32_t kN = 200;
  constexpr uint32_t kK = 256;
  constexpr uint32_t kMost = 230;
  const Weights weights = MakeWeights(format(), kN, kK);
  const std::vector<float> a = RandomFloats(kMost * kK, 9);
  std::vector<float> alone(kMost * kN);
  auto single = MakeKernels(kernels_name(), 1);
  const QuantizedMatrix reference = Pack(single.get(), weights);
  for (size_t row = 0; row < kMost; ++row) {
    single->Gemm(&a[row * kK], kK, 1, reference, &alone[row * kN], kN);
  }
  std::vector<uint32_t> sizes;
  for (uint32_t m = 1; m <= 70; ++m) sizes.push_back(m);
  for (uint32_t m : {95u, 96u, 97u, 108u, 192u, 193u, 208u, kMost}) {
    sizes.push_back(m);
  }
  for (uint32_t threads : {1u, 2u, 3u}) {
    auto kernels = MakeKernels(kernels_name(), threads);
    const QuantizedMatrix packed = Pack(kernels.get(), weights);
    for (uint32_t m : sizes) {
      std::vector<float> c(m * kN);
      kernels->Gemm(a.data(), kK, m, packed, c.data(), kN);
      ASSERT_EQ(std::memcmp(c.data(), alone.data(), c.size() * sizeof(float)),
                0)
          << "m " << m << ", threads " << threads;
    }
  }
}

// So that workers on unlike machines agree in this part at least, and so that
// sets may choose by the number of rows.
TEST_P(QuantizedGemmTest, HasTheBitsOfEverySetThatFusesMultiplyAndAdd) {
  if (kernels_name() == "portable") GTEST_SKIP() << "does not fuse";
  auto kernels = MakeKernels(kernels_name(), 2);
  auto other = MakeKernels("avx2", 2);
  for (const auto& [n, k] : std::vector<std::pair<uint32_t, uint32_t>>{
           {1, 32}, {17, 64}, {75, 96}, {100, 320}, {33, 1568}}) {
    const Weights weights = MakeWeights(format(), n, k);
    const QuantizedMatrix packed = Pack(kernels.get(), weights);
    const QuantizedMatrix reference = Pack(other.get(), weights);
    constexpr uint32_t kMost = 40;
    // Neither rows nor columns begin at a multiple of anything.
    const size_t a_stride = k + 3;
    const size_t c_stride = n + 5;
    std::vector<float> a = RandomFloats(1 + kMost * a_stride, k, 30.0f);
    std::fill_n(&a[1 + 2 * a_stride], kQuantDepth, 0.0f);
    std::fill_n(&a[1 + 3 * a_stride], k, 1e-35f);
    std::fill_n(&a[1 + 33 * a_stride], k, 0.0f);
    for (uint32_t m = 1; m <= kMost; ++m) {
      std::vector<float> c(1 + m * c_stride, -77.0f);
      std::vector<float> want = c;
      kernels->Gemm(&a[1], a_stride, m, packed, &c[1], c_stride);
      other->Gemm(&a[1], a_stride, m, reference, &want[1], c_stride);
      ASSERT_EQ(std::memcmp(c.data(), want.data(), c.size() * sizeof(float)), 0)
          << m << "x" << n << "x" << k;
    }
  }
}

// The largest codes of one sign everywhere: no sum of integers may saturate or
// be rounded.
TEST_P(QuantizedGemmTest, TheLargestCodesAreExact) {
  auto kernels = MakeKernels(kernels_name(), 2);
  constexpr uint32_t kN = 16;
  constexpr uint32_t kK = 64;
  constexpr uint32_t kM = 48;
  Weights weights = MakeWeights(format(), kN, kK);
  std::ranges::fill(weights.scales, FloatToHalf(1.0f));
  std::ranges::fill(weights.minima, FloatToHalf(0.0f));
  const uint8_t most = HasNibbles(format()) ? 15 : 255;
  for (const uint8_t code : {uint8_t{0}, most}) {
    std::ranges::fill(weights.codes, code);
    const QuantizedMatrix packed = Pack(kernels.get(), weights);
    for (const float sign : {1.0f, -1.0f}) {
      const std::vector<float> a(kM * kK, sign * 127.0f);
      std::vector<float> c(kM * kN);
      kernels->Gemm(a.data(), kK, kM, packed, c.data(), kN);
      const float want =
          sign * 127.0f * kK * static_cast<float>(code - ZeroCode(format()));
      EXPECT_THAT(c, ::testing::Each(want));
    }
  }
}

TEST_P(QuantizedGemmTest, ANanStaysInItsRow) {
  auto kernels = MakeKernels(kernels_name(), 2);
  const QuantizedMatrix packed =
      Pack(kernels.get(), MakeWeights(format(), 40, 64));
  for (uint32_t m : {14u, 41u}) {
    std::vector<float> a = RandomFloats(m * 64, 4);
    a[5 * 64 + 7] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> c(m * 40);
    kernels->Gemm(a.data(), 64, m, packed, c.data(), 40);
    for (size_t i = 0; i < c.size(); ++i) {
      ASSERT_EQ(std::isnan(c[i]), i / 40 == 5) << m << ", " << i;
    }
  }
}

TEST_P(QuantizedGemmTest, LookUpGivesRows) {
  auto kernels = MakeKernels(kernels_name(), 2);
  const Weights weights = MakeWeights(format(), 50, 96);
  const QuantizedMatrix packed = Pack(kernels.get(), weights);
  const std::vector<int32_t> ids = {49, 0, 0, 15, 16, 17, 33};
  std::vector<float> out(ids.size() * 100, 5.0f);
  kernels->LookUp(packed, ids, out.data(), 100);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t j = 0; j < 96; ++j) {
      ASSERT_NEAR(out[i * 100 + j],
                  weights.Value(static_cast<size_t>(ids[i]), j), 1e-7);
    }
    ASSERT_EQ(out[i * 100 + 96], 5.0f);
  }
}

TEST_P(QuantizedGemmTest, RefusesRowsThatAreNotWholeBlocks) {
  auto kernels = MakeKernels(kernels_name(), 1);
  const auto nothing = [](uint64_t, const QuantizedMatrix::Row&) {};
  for (const auto& [n, k] :
       std::vector<std::pair<uint32_t, uint32_t>>{{0, 32}, {4, 0}, {4, 48}}) {
    EXPECT_THAT(kernels->PackQuantized(n, k, format(), nothing),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         ::testing::HasSubstr("blocks of 32")));
  }
}

const char* FormatName(QuantFormat format) {
  switch (format) {
    case QuantFormat::kNibbles:
      return "nibbles";
    case QuantFormat::kNibblesMin:
      return "nibbles_min";
    case QuantFormat::kBytes:
      return "bytes";
    case QuantFormat::kByteHalves:
      return "byte_halves";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(
    AllThatRun, QuantizedGemmTest,
    ::testing::Combine(::testing::ValuesIn(Kernels::Runnable()),
                       ::testing::Values(QuantFormat::kNibbles,
                                         QuantFormat::kNibblesMin,
                                         QuantFormat::kBytes,
                                         QuantFormat::kByteHalves)),
    [](const auto& named) {
      return std::get<0>(named.param) + "_" +
             FormatName(std::get<1>(named.param));
    });

}  // namespace
}  // namespace promptcache::worker::cpu
