#include <gtest/gtest.h>

#include <algorithm>
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

TEST_P(ElementwiseTest, RmsNormHeadsNormsEachHeadAsARowOfItsOwn) {
  auto kernels = MakeKernels(GetParam(), 2);
  const size_t rows = 30, heads = 3, dim = 48, stride = heads * dim + 5;
  const std::vector<float> x = RandomFloats(rows * stride, 1, 3.0f);
  const std::vector<float> weight = RandomFloats(dim, 2);
  std::vector<float> out = x;
  kernels->RmsNormHeads(weight.data(), 1e-6f, rows, stride, heads, dim,
                        out.data());
  std::vector<float> want = x;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t head = 0; head < heads; ++head) {
      float* const at = &want[row * stride + head * dim];
      kernels->RmsNorm(at, weight.data(), 1e-6f, 1, dim, at);
    }
  }
  EXPECT_EQ(out, want);
}

// The mean is far from 0 in some rows: where the variance is that of the
// deviations, nothing cancels.
TEST_P(ElementwiseTest, LayerNormMatchesDoublePrecision) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (size_t dim : {1, 3, 16, 63, 64, 65, 576, 2049}) {
    const size_t rows = 40;
    std::vector<float> x = RandomFloats(rows * dim, 1, 3.0f);
    for (size_t i = 0; i < x.size(); i += 2) x[i] += 20.0f;
    const std::vector<float> weight = RandomFloats(dim, 2);
    const std::vector<float> bias = RandomFloats(dim, 3);
    for (const float* b : {bias.data(), static_cast<const float*>(nullptr)}) {
      std::vector<float> out(x.size());
      kernels->LayerNorm(x.data(), weight.data(), b, 1e-5f, rows, dim,
                         out.data());
      for (size_t row = 0; row < rows; ++row) {
        const double n = static_cast<double>(dim);
        double mean = 0, variance = 0;
        for (size_t d = 0; d < dim; ++d) mean += x[row * dim + d] / n;
        for (size_t d = 0; d < dim; ++d) {
          variance += std::pow(x[row * dim + d] - mean, 2) / n;
        }
        const double inverse = 1 / std::sqrt(variance + 1e-5);
        for (size_t d = 0; d < dim; ++d) {
          const double added = b == nullptr ? 0 : b[d];
          const double want =
              (x[row * dim + d] - mean) * inverse * weight[d] + added;
          // Of what is subtracted and added.
          const double size = (std::abs(x[row * dim + d]) + std::abs(mean)) *
                                  inverse * std::abs(weight[d]) +
                              std::abs(added);
          ASSERT_NEAR(out[row * dim + d], want, 5e-7 * size) << dim;
        }
      }
      std::vector<float> last(dim);
      kernels->LayerNorm(&x[(rows - 1) * dim], weight.data(), b, 1e-5f, 1, dim,
                         last.data());
      EXPECT_EQ(
          std::memcmp(last.data(), &out[(rows - 1) * dim], dim * sizeof(float)),
          0);
    }
  }
}

struct ActivationCase {
  Activation activation;
  double (*definition)(double);
  // Relative; where the argument of an exponential is itself rounded, that
  // adds a multiple of its size.
  double tolerance;
  double per_unit;
};

double Silu(double x) { return x / (1 + std::exp(-x)); }
double Gelu(double x) { return 0.5 * x * std::erfc(-x * std::sqrt(0.5)); }
double TanhArgument(double x) {
  return std::sqrt(8 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
}
double GeluTanh(double x) { return x / (1 + std::exp(-TanhArgument(x))); }
double Relu(double x) { return std::max(x, 0.0); }

const ActivationCase kActivations[] = {
    {Activation::kSilu, Silu, 1e-6, 0},
    {Activation::kGelu, Gelu, 1e-6, 0},
    {Activation::kGeluTanh, GeluTanh, 1e-6, 2e-7},
    {Activation::kRelu, Relu, 1e-7, 0},
};

TEST_P(ElementwiseTest, ActivationsMatchDoublePrecisionOverTheWholeRange) {
  auto kernels = MakeKernels(GetParam(), 2);
  constexpr size_t kDim = 4099;
  std::vector<float> in(2 * kDim * 5);
  for (size_t i = 0; i < in.size(); ++i) {
    // From -85 to 85 and from -8 to 8, all scales near zero.
    const double t = static_cast<double>(i) / static_cast<double>(in.size());
    const double x[] = {170 * t - 85, std::pow(t, 9) - t, 16 * t - 8};
    in[i] = static_cast<float>(x[i % 3]);
  }
  for (const ActivationCase& c : kActivations) {
    for (const bool gated : {true, false}) {
      std::vector<float> out(kDim * 5);
      kernels->Activate(c.activation, in.data(),
                        gated ? in.data() + kDim : nullptr, 2 * kDim, 5, kDim,
                        out.data());
      for (size_t i = 0; i < out.size(); ++i) {
        const size_t at = i / kDim * 2 * kDim + i % kDim;
        const double x = in[at];
        const double up = gated ? in[at + kDim] : 1;
        const double want = c.definition(x) * up;
        const double relative =
            c.tolerance + c.per_unit * std::abs(TanhArgument(x));
        // Below the smallest exponential all is as good as zero.
        const double tiny = std::abs(x * up) * 2e-38;
        ASSERT_NEAR(out[i], want, relative * std::abs(want) + tiny)
            << x << ", activation " << static_cast<int>(c.activation);
      }
    }
  }
}

TEST_P(ElementwiseTest, ActivationsStandExtremes) {
  auto kernels = MakeKernels(GetParam(), 1);
  const float gates[] = {-1e30f, -1000.0f, -88.0f,       0.0f,
                         88.0f,  1e30f,    std::nanf("")};
  const float ups[] = {1, 1, 1, 1, 1, 1, 1};
  for (const ActivationCase& c : kActivations) {
    float out[7];
    kernels->Activate(c.activation, gates, ups, 7, 1, 7, out);
    EXPECT_NEAR(out[1], 0, 1e-30);
    EXPECT_NEAR(out[2], 0, 1e-30);
    EXPECT_EQ(out[3], 0);
    EXPECT_EQ(out[4], 88.0f);
    EXPECT_EQ(out[5], 1e30f);
    EXPECT_TRUE(std::isnan(out[6]));
  }
}

TEST_P(ElementwiseTest, ScalesEveryElement) {
  auto kernels = MakeKernels(GetParam(), 3);
  for (size_t count : {0, 1, 17, 1024, 70000}) {
    std::vector<float> x = RandomFloats(count, 2);
    const std::vector<float> before = x;
    kernels->Scale(8.5f, count, x.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(x[i], before[i] * 8.5f);
  }
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
