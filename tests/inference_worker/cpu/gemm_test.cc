#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "tests/inference_worker/cpu/reference.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

struct Problem {
  uint32_t n;
  uint32_t k;
  std::vector<float> weights;  // [n][k]
  PackedMatrix packed;
};

Problem MakeProblem(Kernels* kernels, uint32_t n, uint32_t k) {
  Problem problem = {.n = n, .k = k};
  problem.weights = RandomFloats(size_t{n} * k, n + k, 0.05f);
  auto packed = kernels->Pack(n, k, [&](uint64_t index, std::span<float> row) {
    std::copy_n(&problem.weights[index * k], k, row.begin());
  });
  CHECK(packed.ok());
  problem.packed = *std::move(packed);
  return problem;
}

// Sum of products of bf16 weights with (bf16 or fp32) activations in double,
// and the sum of their magnitudes, which the error scales with.
std::pair<double, double> Dot(const float* a, const float* w, uint32_t k,
                              bool round_a) {
  double sum = 0;
  double magnitude = 0;
  for (uint32_t i = 0; i < k; ++i) {
    const double x = round_a ? RoundedToBf16(a[i]) : a[i];
    sum += x * RoundedToBf16(w[i]);
    magnitude += std::abs(x * RoundedToBf16(w[i]));
  }
  return {sum, magnitude};
}

// Relative to the magnitudes: fp32 sums of up to some thousand terms.
constexpr double kTolerance = 2e-6;

class GemmTest : public ::testing::TestWithParam<std::string> {
 protected:
  bool RoundsActivations() const {
    return GetParam() == "avx512bf16" || GetParam() == "amx";
  }
};

TEST_P(GemmTest, MatchesDoublePrecisionForEveryShape) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (const auto& [n, k] :
       std::vector<std::pair<uint32_t, uint32_t>>{{1, 1},
                                                  {3, 2},
                                                  {8, 31},
                                                  {16, 32},
                                                  {17, 33},
                                                  {32, 64},
                                                  {33, 65},
                                                  {64, 1},
                                                  {95, 100},
                                                  {192, 576},
                                                  {129, 1536}}) {
    const Problem problem = MakeProblem(kernels.get(), n, k);
    for (uint32_t m :
         {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 11u, 12u, 13u, 50u, 97u}) {
      const size_t a_stride = k + 3;
      const size_t c_stride = n + 5;
      const std::vector<float> a = RandomFloats(m * a_stride + 1, m);
      std::vector<float> c(m * c_stride, -77.0f);
      kernels->Gemm(a.data(), a_stride, m, problem.packed, c.data(), c_stride);
      for (uint32_t row = 0; row < m; ++row) {
        for (uint32_t col = 0; col < n; ++col) {
          const auto [want, magnitude] =
              Dot(&a[row * a_stride], &problem.weights[size_t{col} * k], k,
                  RoundsActivations());
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

TEST_P(GemmTest, AddsBiasThenResidualAlsoInPlace) {
  auto kernels = MakeKernels(GetParam(), 2);
  const Problem problem = MakeProblem(kernels.get(), 75, 48);
  const std::vector<float> bias = RandomFloats(75, 1);
  for (uint32_t m : {1u, 4u, 30u}) {
    const std::vector<float> a = RandomFloats(m * 48, 2);
    std::vector<float> plain(m * 75);
    kernels->Gemm(a.data(), 48, m, problem.packed, plain.data(), 75);
    std::vector<float> c = RandomFloats(m * 75, 3);
    const std::vector<float> before = c;
    kernels->Gemm(a.data(), 48, m, problem.packed, c.data(), 75,
                  {.bias = bias.data(), .residual = c.data()});
    for (size_t i = 0; i < c.size(); ++i) {
      ASSERT_EQ(c[i], plain[i] + bias[i % 75] + before[i]) << i;
    }
  }
}

TEST_P(GemmTest, RowsDoNotDependOnOthersNorOnThreads) {
  constexpr uint32_t kN = 200;
  constexpr uint32_t kK = 257;
  const std::vector<float> a = RandomFloats(300 * kK, 9);
  std::vector<float> alone(300 * kN);
  auto single = MakeKernels(GetParam(), 1);
  const Problem reference = MakeProblem(single.get(), kN, kK);
  for (size_t row = 0; row < 300; ++row) {
    single->Gemm(&a[row * kK], kK, 1, reference.packed, &alone[row * kN], kN);
  }
  std::vector<uint32_t> sizes;
  for (uint32_t m = 1; m <= 13; ++m) sizes.push_back(m);
  for (uint32_t m : {31u, 32u, 33u, 47u, 48u, 49u, 64u, 95u, 96u, 97u, 108u,
                     192u, 193u, 300u}) {
    sizes.push_back(m);
  }
  for (uint32_t threads : {1u, 2u, 3u}) {
    auto kernels = MakeKernels(GetParam(), threads);
    const Problem problem = MakeProblem(kernels.get(), kN, kK);
    for (uint32_t m : sizes) {
      std::vector<float> c(m * kN);
      kernels->Gemm(a.data(), kK, m, problem.packed, c.data(), kN);
      ASSERT_EQ(std::memcmp(c.data(), alone.data(), c.size() * sizeof(float)),
                0)
          << "m " << m << ", threads " << threads;
    }
  }
}

TEST_P(GemmTest, ANanStaysInItsRow) {
  auto kernels = MakeKernels(GetParam(), 2);
  const Problem problem = MakeProblem(kernels.get(), 40, 40);
  std::vector<float> a = RandomFloats(14 * 40, 4);
  a[5 * 40 + 7] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> c(14 * 40);
  kernels->Gemm(a.data(), 40, 14, problem.packed, c.data(), 40);
  for (size_t i = 0; i < c.size(); ++i) {
    ASSERT_EQ(std::isnan(c[i]), i / 40 == 5) << i;
  }
}

TEST_P(GemmTest, LookUpGivesRows) {
  auto kernels = MakeKernels(GetParam(), 2);
  const Problem problem = MakeProblem(kernels.get(), 500, 70);
  const std::vector<int32_t> ids = {499, 0, 0, 17, 31, 32, 33};
  std::vector<float> out(ids.size() * 72, 5.0f);
  kernels->LookUp(problem.packed, ids, out.data(), 72);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t j = 0; j < 70; ++j) {
      ASSERT_EQ(
          out[i * 72 + j],
          RoundedToBf16(problem.weights[static_cast<size_t>(ids[i]) * 70 + j]));
    }
    ASSERT_EQ(out[i * 72 + 70], 5.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(AllThatRun, GemmTest,
                         ::testing::ValuesIn(Kernels::Runnable()),
                         [](const auto& named) { return named.param; });

}  // namespace
}  // namespace promptcache::worker::cpu
