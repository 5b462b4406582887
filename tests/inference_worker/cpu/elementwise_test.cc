#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/inference_worker/cpu/reference.h"

namespace promptcache::worker::cpu {
namespace {

class ElementwiseTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ElementwiseTest, RmsNormMatchesDoublePrecision) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (size_t dim : {1, 3, 16, 63, 64, 65, 576, 2049}) {
    const size_t rows = 40;
    const std::vector<float> x = RandomFloats(rows * dim, 1, 3.0f);
    const std::vector<float> weight = RandomFloats(dim, 2);
    std::vector<float> out(x.size());
    kernels->RmsNorm(x.data(), weight.data(), 1e-5f, rows, dim, out.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const float* row = &x[i / dim * dim];
      double squares = 0;
      for (size_t d = 0; d < dim; ++d) squares += double{row[d]} * row[d];
      const double want = x[i] /
                          std::sqrt(squares / static_cast<double>(dim) + 1e-5) *
                          weight[i % dim];
      ASSERT_NEAR(out[i], want, 1e-6 * std::abs(want)) << dim;
    }
    std::vector<float> in_place = x;
    kernels->RmsNorm(in_place.data(), weight.data(), 1e-5f, rows, dim,
                     in_place.data());
    EXPECT_EQ(in_place, out);
    std::vector<float> last(dim);
    kernels->RmsNorm(&x[(rows - 1) * dim], weight.data(), 1e-5f, 1, dim,
                     last.data());
    EXPECT_EQ(
        std::memcmp(last.data(), &out[(rows - 1) * dim], dim * sizeof(float)),
        0);
  }
}

TEST_P(ElementwiseTest, SwiGluMatchesDoublePrecisionOverTheWholeRange) {
  auto kernels = MakeKernels(GetParam(), 2);
  constexpr size_t kDim = 4099;
  std::vector<float> in(2 * kDim * 5);
  for (size_t i = 0; i < in.size(); ++i) {
    // Gates from -85 to 85, all scales near zero.
    const double t = static_cast<double>(i) / static_cast<double>(in.size());
    in[i] = static_cast<float>(i % 3 == 0 ? 170 * t - 85 : std::pow(t, 9) - t);
  }
  std::vector<float> out(kDim * 5);
  kernels->SwiGlu(in.data(), in.data() + kDim, 2 * kDim, 5, kDim, out.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const double gate = in[i / kDim * 2 * kDim + i % kDim];
    const double up = in[i / kDim * 2 * kDim + kDim + i % kDim];
    const double want = gate / (1 + std::exp(-gate)) * up;
    ASSERT_NEAR(out[i], want, 1e-6 * std::abs(want) + 1e-42) << gate;
  }
}

TEST_P(ElementwiseTest, SwiGluStandsExtremes) {
  auto kernels = MakeKernels(GetParam(), 1);
  const float gates[] = {-1e30f, -1000.0f, -88.0f,       0.0f,
                         88.0f,  1e30f,    std::nanf("")};
  const float ups[] = {1, 1, 1, 1, 1, 1, 1};
  float out[7];
  kernels->SwiGlu(gates, ups, 7, 1, 7, out);
  EXPECT_NEAR(out[1], 0, 1e-30);
  EXPECT_NEAR(out[2], 0, 1e-30);
  EXPECT_EQ(out[3], 0);
  EXPECT_EQ(out[4], 88.0f);
  EXPECT_EQ(out[5], 1e30f);
  EXPECT_TRUE(std::isnan(out[6]));
}

TEST_P(ElementwiseTest, AddsEveryElement) {
  auto kernels = MakeKernels(GetParam(), 3);
  for (size_t count : {0, 1, 17, 1023, 1024, 1025, 70000}) {
    const std::vector<float> y = RandomFloats(count, 1);
    std::vector<float> x = RandomFloats(count, 2);
    const std::vector<float> before = x;
    kernels->Add(y.data(), count, x.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(x[i], before[i] + y[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(AllThatRun, ElementwiseTest,
                         ::testing::ValuesIn(Kernels::Runnable()),
                         [](const auto& named) { return named.param; });

}  // namespace
}  // namespace promptcache::worker::cpu
