// Against the definitions, computed in double.

#include "cuda/kernels/norm.h"

#include <cmath>

#include "common/float_types.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

constexpr float kEpsilon = 1e-5f;

struct Row {
  std::vector<float> x, weight, bias;
};

std::vector<double> Expected(std::span<const float> x, const Row& row,
                             bool layer_norm) {
  double mean = 0;
  double squares = 0;
  const auto dim = static_cast<double>(x.size());
  if (layer_norm) {
    for (const float v : x) mean += v / dim;
  }
  for (const float v : x) squares += (v - mean) * (v - mean) / dim;
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i) {
    out.push_back((x[i] - mean) / std::sqrt(squares + kEpsilon) *
                      row.weight[i] +
                  (row.bias.empty() ? 0 : row.bias[i]));
  }
  return out;
}

class NormTest : public KernelTest {
 protected:
  // Every output of `num_rows` rows; compared with the definition.
  void Check(int32_t num_rows, int32_t dim, bool layer_norm, bool bias) {
    const auto d = static_cast<size_t>(dim);
    const size_t count = static_cast<size_t>(num_rows) * d;
    Row row = {.x = RandomFloats(count), .weight = RandomFloats(d)};
    // Far from zero: a variance by difference of squares would be lost.
    for (float& x : row.x) x += 30;
    if (bias) row.bias = RandomFloats(d);
    const std::vector<float> residual = RandomFloats(count);
    NormParams params = {.x = Upload(row.x),
                         .weight = Upload(row.weight),
                         .bias = bias ? Upload(row.bias) : nullptr,
                         .layer_norm = layer_norm,
                         .epsilon = kEpsilon,
                         .num_rows = num_rows,
                         .dim = dim,
                         .out_bf16 = Room<uint16_t>(count),
                         .out = Room<float>(count),
                         .add_to = Upload(residual)};
    PC_ASSERT_OK(Launched(LaunchNorm(params, stream_->native())));
    const auto out = Download(params.out, count);
    const auto rounded = Download(params.out_bf16, count);
    const auto sum = Download(params.add_to, count);
    for (size_t r = 0; r < static_cast<size_t>(num_rows); ++r) {
      const auto want =
          Expected(std::span(row.x).subspan(r * d, d), row, layer_norm);
      for (size_t i = 0; i < d; ++i) {
        const size_t at = r * d + i;
        const double tolerance = 1e-5 + 2e-5 * std::abs(want[i]);
        ASSERT_NEAR(out[at], want[i], tolerance)
            << dim << ": " << r << " " << i;
        ASSERT_EQ(rounded[at], FloatToBf16(out[at]));
        ASSERT_NEAR(sum[at], want[i] + residual[at], 2 * tolerance);
      }
    }
  }
};

TEST_F(NormTest, RmsOfAnyWidth) {
  for (const int32_t dim : {1, 31, 32, 33, 96, 129, 576, 4097}) {
    Check(2, dim, /*layer_norm=*/false, /*bias=*/false);
  }
  Check(5, 64, false, false);
}

TEST_F(NormTest, LayerNormWithAndWithoutBias) {
  for (const int32_t dim : {1, 33, 96, 1000}) {
    Check(3, dim, /*layer_norm=*/true, /*bias=*/true);
    Check(1, dim, /*layer_norm=*/true, /*bias=*/false);
  }
}

TEST_F(NormTest, NoRowsIsNothing) {
  EXPECT_EQ(LaunchNorm({.num_rows = 0, .dim = 8}, stream_->native()),
            cudaSuccess);
}

TEST_F(NormTest, GathersRowsByIndex) {
  const std::vector<float> x = RandomFloats(6 * 40);
  const std::vector<float> weight = RandomFloats(40);
  const std::vector<int32_t> index = {4, 0, 4};
  NormParams params = {.x = Upload(x),
                       .weight = Upload(weight),
                       .epsilon = kEpsilon,
                       .num_rows = 6,
                       .dim = 40,
                       .out = Room<float>(6 * 40)};
  PC_ASSERT_OK(Launched(LaunchNorm(params, stream_->native())));
  const auto all = Download(params.out, 6 * 40);
  params.row_index = Upload(index);
  params.num_rows = 3;
  params.out = Room<float>(3 * 40);
  PC_ASSERT_OK(Launched(LaunchNorm(params, stream_->native())));
  const auto picked = Download(params.out, 3 * 40);
  for (size_t r = 0; r < 3; ++r) {
    for (size_t i = 0; i < 40; ++i) {
      ASSERT_EQ(picked[r * 40 + i],
                all[static_cast<size_t>(index[r]) * 40 + i]);
    }
  }
}

TEST_F(NormTest, InPlace) {
  const std::vector<float> x = RandomFloats(2 * 70);
  const std::vector<float> weight = RandomFloats(70);
  NormParams params = {.x = Upload(x),
                       .weight = Upload(weight),
                       .epsilon = kEpsilon,
                       .num_rows = 2,
                       .dim = 70,
                       .out = Room<float>(2 * 70)};
  PC_ASSERT_OK(Launched(LaunchNorm(params, stream_->native())));
  const auto apart = Download(params.out, 2 * 70);
  params.out = const_cast<float*>(params.x);
  PC_ASSERT_OK(Launched(LaunchNorm(params, stream_->native())));
  EXPECT_EQ(Download(params.out, 2 * 70), apart);
}

}  // namespace
}  // namespace promptcache::gpu
