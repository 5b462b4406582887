// Activations, embeddings, biases: against the definitions in double.

#include <cmath>
#include <numbers>

#include "common/float_types.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/add_bias.h"
#include "cuda/kernels/embedding.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

double Activated(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSilu:
      return x / (1 + std::exp(-x));
    case ActivationKind::kGelu:
      return x * 0.5 * std::erfc(-x / std::numbers::sqrt2);
    case ActivationKind::kGeluTanh:
      return 0.5 * x *
             (1 + std::tanh(std::sqrt(2 / std::numbers::pi) *
                            (x + 0.044715 * x * x * x)));
    case ActivationKind::kRelu:
      return std::max(x, 0.0);
  }
  return 0;
}

class ActivationTest : public KernelTest {
 protected:
  void Check(ActivationKind kind, size_t num_rows, size_t dim, bool gated,
             bool biased) {
    const size_t width = gated ? 2 * dim : dim;
    const size_t stride = width + 3;
    const std::vector<float> x = RandomFloats(num_rows * stride, 3);
    const std::vector<float> bias = RandomFloats(width);
    const ActivationParams params = {.x = Upload(x),
                                     .bias = biased ? Upload(bias) : nullptr,
                                     .out = Room<uint16_t>(num_rows * dim),
                                     .num_rows = static_cast<int32_t>(num_rows),
                                     .dim = static_cast<int32_t>(dim),
                                     .in_stride = static_cast<int32_t>(stride),
                                     .gated = gated,
                                     .kind = kind};
    PC_ASSERT_OK(Launched(LaunchActivation(params, stream_->native())));
    const auto out = Download(params.out, num_rows * dim);
    for (size_t r = 0; r < num_rows; ++r) {
      for (size_t i = 0; i < dim; ++i) {
        const auto in = [&](size_t at) {
          return double{x[r * stride + at]} + (biased ? bias[at] : 0);
        };
        double want = Activated(kind, in(i));
        if (gated) want *= in(dim + i);
        // Half a unit of bf16, and fp32 cancellation in GELU's left tail.
        ASSERT_NEAR(Bf16ToFloat(out[r * dim + i]), want,
                    2e-6 + std::abs(want) * 0.00393)
            << in(i);
      }
    }
  }
};

TEST_F(ActivationTest, EveryKindGatedAndPlain) {
  for (const auto kind : {ActivationKind::kSilu, ActivationKind::kGelu,
                          ActivationKind::kGeluTanh, ActivationKind::kRelu}) {
    for (const bool gated : {false, true}) {
      Check(kind, 3, 127, gated, /*biased=*/false);
      Check(kind, 1, 129, gated, /*biased=*/true);
    }
  }
}

TEST_F(ActivationTest, OddWidthsAndNoRows) {
  for (const size_t dim : {1u, 128u, 300u}) {
    Check(ActivationKind::kSilu, 2, dim, true, false);
  }
  EXPECT_EQ(LaunchActivation({.num_rows = 0, .dim = 5}, stream_->native()),
            cudaSuccess);
}

TEST_F(ActivationTest, LargeValuesSaturate) {
  const std::vector<float> x = {-200, 200, -1e30f, 1e30f};
  for (const auto kind :
       {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kRelu}) {
    const ActivationParams params = {.x = Upload(x),
                                     .out = Room<uint16_t>(4),
                                     .num_rows = 1,
                                     .dim = 4,
                                     .in_stride = 4,
                                     .kind = kind};
    PC_ASSERT_OK(Launched(LaunchActivation(params, stream_->native())));
    const auto out = Download(params.out, 4);
    EXPECT_EQ(Bf16ToFloat(out[0]), 0);
    EXPECT_EQ(Bf16ToFloat(out[1]), 200);
    EXPECT_EQ(Bf16ToFloat(out[2]), 0);
    EXPECT_EQ(out[3], FloatToBf16(1e30f));
  }
}

class EmbeddingTest : public KernelTest {};

TEST_F(EmbeddingTest, ScalesAndAddsPositions) {
  constexpr size_t kDim = 131;
  std::vector<uint16_t> table, positions;
  for (const float v : RandomFloats(9 * kDim)) table.push_back(FloatToBf16(v));
  for (const float v : RandomFloats(7 * kDim)) {
    positions.push_back(FloatToBf16(v));
  }
  const std::vector<int32_t> ids = {8, 0, 3, 8};
  const std::vector<int32_t> rows = {0, 6, 2, 5};
  for (const bool learned : {false, true}) {
    const EmbeddingParams params = {
        .table = Upload(table),
        .ids = Upload(ids),
        .scale = 1.7f,
        .positions = learned ? Upload(positions) : nullptr,
        .position_rows = learned ? Upload(rows) : nullptr,
        .out = Room<float>(4 * kDim),
        .num_rows = 4,
        .dim = kDim};
    PC_ASSERT_OK(Launched(LaunchEmbedding(params, stream_->native())));
    const auto out = Download(params.out, 4 * kDim);
    for (size_t r = 0; r < 4; ++r) {
      for (size_t i = 0; i < kDim; ++i) {
        float want =
            Bf16ToFloat(table[static_cast<size_t>(ids[r]) * kDim + i]) * 1.7f;
        if (learned) {
          want +=
              Bf16ToFloat(positions[static_cast<size_t>(rows[r]) * kDim + i]);
        }
        ASSERT_NEAR(out[r * kDim + i], want, 1e-6) << r << " " << i;
      }
    }
  }
}

class AddBiasTest : public KernelTest {};

TEST_F(AddBiasTest, AddsToEveryRow) {
  for (const size_t dim : {1u, 127u, 260u}) {
    const std::vector<float> x = RandomFloats(3 * dim);
    const std::vector<float> bias = RandomFloats(dim);
    const AddBiasParams params = {.x = Upload(x),
                                  .bias = Upload(bias),
                                  .num_rows = 3,
                                  .dim = static_cast<int32_t>(dim)};
    PC_ASSERT_OK(Launched(LaunchAddBias(params, stream_->native())));
    const auto out = Download(params.x, 3 * dim);
    for (size_t i = 0; i < 3 * dim; ++i) {
      ASSERT_EQ(out[i], x[i] + bias[i % dim]);
    }
  }
}

}  // namespace
}  // namespace promptcache::gpu
