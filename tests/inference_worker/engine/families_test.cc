// What follows from a family's configuration, against definitions written
// another way.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "inference_worker/engine/families/config_check.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/relative_bias.h"
#include "inference_worker/engine/families/reuse.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

ModelConfig SmallConfig() {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_dim = 64;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.ffn_dim = 128;
  config.vocab_size = 100;
  config.context_length = 4096;
  config.rope.dims = 32;
  return config;
}

Rotation RotationFor(const RopeScaling& scaling, float theta = 10000.0f) {
  ModelConfig config = SmallConfig();
  config.rope.theta = theta;
  config.rope.scaling = scaling;
  auto rotation = RotationOf(config, /*local=*/false);
  PC_EXPECT_OK(rotation);
  return *std::move(rotation);
}

double Plain(size_t pair, double theta = 10000) {
  return std::pow(theta, -static_cast<double>(pair) / 16);
}

TEST(RotationTest, LinearScalingDividesEveryFrequency) {
  const Rotation rotation =
      RotationFor({.kind = RopeScalingKind::kLinear, .factor = 2.5f});
  ASSERT_EQ(rotation.inv_freq.size(), 16u);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_DOUBLE_EQ(rotation.inv_freq[i], Plain(i) / 2.5);
  }
  EXPECT_EQ(rotation.factor, 1);
}

// By wave lengths, as Llama 3.1 defines it.
TEST(RotationTest, Llama3KeepsHighFrequenciesAndDividesLowOnes) {
  const Rotation rotation = RotationFor({.kind = RopeScalingKind::kLlama3,
                                         .factor = 8,
                                         .original_context = 64,
                                         .low_freq_factor = 1,
                                         .high_freq_factor = 4},
                                        500000);
  int kept = 0, ramp = 0, divided = 0;
  for (size_t i = 0; i < 16; ++i) {
    const double plain = Plain(i, 500000);
    const double length = 2 * std::numbers::pi / plain;
    double want = plain;
    if (length > 64.0 / 1) {
      want = plain / 8;
      ++divided;
    } else if (length >= 64.0 / 4) {
      const double smooth = (64 / length - 1) / (4 - 1);
      want = (1 - smooth) * plain / 8 + smooth * plain;
      ++ramp;
    } else {
      ++kept;
    }
    EXPECT_NEAR(rotation.inv_freq[i], want, 1e-12 * want) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(ramp, 0);
  EXPECT_GT(divided, 0);
}

TEST(RotationTest, YarnRampsOverPairsAndMultipliesCosAndSin) {
  const Rotation rotation = RotationFor(
      {.kind = RopeScalingKind::kYarn, .factor = 4, .original_context = 2048});
  EXPECT_NEAR(rotation.factor, 0.1 * std::log(4.0) + 1, 1e-12);
  // 32 turns within 2048 positions: pair 4.03; one turn: pair 10.05.
  for (size_t i = 0; i <= 4; ++i) {
    EXPECT_NEAR(rotation.inv_freq[i], Plain(i), 1e-12) << i;
  }
  for (size_t i = 5; i < 11; ++i) {
    const double share = (static_cast<double>(i) - 4) / (11 - 4);
    const double want = Plain(i) / 4 * share + Plain(i) * (1 - share);
    EXPECT_NEAR(rotation.inv_freq[i], want, 1e-12) << i;
  }
  for (size_t i = 11; i < 16; ++i) {
    EXPECT_NEAR(rotation.inv_freq[i], Plain(i) / 4, 1e-12) << i;
  }
  EXPECT_EQ(RotationFor({.kind = RopeScalingKind::kYarn,
                         .factor = 4,
                         .original_context = 2048,
                         .attention_factor = 1.5f})
                .factor,
            1.5);
}

TEST(RotationTest, DivisorsStandForTheFormula) {
  std::vector<float> divisors;
  for (int i = 0; i < 16; ++i)
    divisors.push_back(1 + 0.5f * static_cast<float>(i));
  for (const RopeScalingKind kind :
       {RopeScalingKind::kLlama3, RopeScalingKind::kLongRope}) {
    const bool long_rope = kind == RopeScalingKind::kLongRope;
    const Rotation rotation =
        RotationFor({.kind = kind,
                     .attention_factor = long_rope ? 1.25f : 0.0f,
                     .divisors = divisors});
    for (size_t i = 0; i < 16; ++i) {
      EXPECT_DOUBLE_EQ(rotation.inv_freq[i], Plain(i) / divisors[i]);
    }
    EXPECT_EQ(rotation.factor, long_rope ? 1.25 : 1.0);
  }
}

TEST(RotationTest, LocalLayersHaveTheirOwnBaseUnscaled) {
  ModelConfig config = SmallConfig();
  config.rope.theta = 1000000;
  config.rope.scaling = {.kind = RopeScalingKind::kLinear, .factor = 8};
  config.local_rope_theta = 10000;
  const auto rotation = RotationOf(config, /*local=*/true);
  PC_ASSERT_OK(rotation);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_DOUBLE_EQ(rotation->inv_freq[i], Plain(i));
  }
}

TEST(RotationTest, RefusesNumbersThatMakeNoSense) {
  for (const RopeScaling& scaling :
       {RopeScaling{.kind = RopeScalingKind::kLinear, .factor = 0},
        RopeScaling{.kind = RopeScalingKind::kLongRope, .divisors = {1, 2}},
        RopeScaling{.kind = RopeScalingKind::kLlama3,
                    .divisors = std::vector<float>(16, 0.0f)},
        RopeScaling{.kind = RopeScalingKind::kYarn, .factor = 4},
        RopeScaling{.kind = RopeScalingKind::kLlama3,
                    .factor = 8,
                    .original_context = 64,
                    .low_freq_factor = 4,
                    .high_freq_factor = 4}}) {
    ModelConfig config = SmallConfig();
    config.rope.scaling = scaling;
    EXPECT_THAT(RotationOf(config, /*local=*/false),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("RoPE scaling")));
  }
}

TEST(AlibiSlopesTest, HalveFromHeadToHeadOfAPowerOfTwo) {
  ModelConfig config = SmallConfig();
  config.num_heads = 8;
  EXPECT_THAT(AlibiSlopes(config),
              ElementsAre(1 / 2.0f, 1 / 4.0f, 1 / 8.0f, 1 / 16.0f, 1 / 32.0f,
                          1 / 64.0f, 1 / 128.0f, 1 / 256.0f));
}

TEST(AlibiSlopesTest, TakeEveryOtherOneOfTheNextPowerOfTwoFirst) {
  ModelConfig config = SmallConfig();
  config.num_heads = 6;
  EXPECT_THAT(AlibiSlopes(config), ElementsAre(1 / 4.0f, 1 / 16.0f, 1 / 64.0f,
                                               1 / 256.0f, 1 / 2.0f, 1 / 8.0f));
}

TEST(AlibiSlopesTest, AreScaledWhereTheBiasIsAddedBeforeTheScale) {
  ModelConfig config = SmallConfig();
  config.num_heads = 4;
  config.head_dim = 64;
  config.alibi_before_scale = true;
  EXPECT_THAT(AlibiSlopes(config),
              ElementsAre(FloatEq(1 / 32.0f), FloatEq(1 / 128.0f),
                          FloatEq(1 / 512.0f), FloatEq(1 / 2048.0f)));
}

TEST(ReuseRuleTest, FollowsFromHowPositionsEnter) {
  ModelConfig config = SmallConfig();
  EXPECT_EQ(ReuseRuleOf(config), ReuseRule::kAnywhere);
  EXPECT_EQ(UsableContext(config), 4096u);
  config.rope.scaling = {.kind = RopeScalingKind::kDynamicNtk,
                         .factor = 2,
                         .original_context = 2048};
  EXPECT_EQ(ReuseRuleOf(config), ReuseRule::kNever);
  EXPECT_EQ(UsableContext(config), 2048u);
  config.positions = PositionKind::kAlibi;
  EXPECT_EQ(ReuseRuleOf(config), ReuseRule::kAnywhere);
  config.positions = PositionKind::kLearned;
  EXPECT_EQ(ReuseRuleOf(config), ReuseRule::kInPlace);
}

// Distances -140 to 140 in steps of 7 by the formula of transformers, in
// float32 as there; 32 buckets up to 128.
TEST(RelativeBucketTest, FollowsTheFormulaInBothDirections) {
  const std::vector<uint32_t> both_ways = {
      15, 15, 15, 15, 15, 15, 15, 15, 14, 14, 14, 13, 13, 13,
      12, 12, 11, 10, 9,  7,  0,  23, 25, 26, 27, 28, 28, 29,
      29, 29, 30, 30, 30, 31, 31, 31, 31, 31, 31, 31, 31};
  const std::vector<uint32_t> backwards = {
      31, 31, 31, 31, 30, 30, 29, 29, 28, 28, 27, 26, 25, 24,
      23, 22, 20, 18, 14, 7,  0,  0,  0,  0,  0,  0,  0,  0,
      0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0};
  size_t i = 0;
  for (int32_t distance = -140; distance <= 140; distance += 7, ++i) {
    EXPECT_EQ(RelativeBucket(distance, 32, 128, true), both_ways.at(i))
        << distance;
    EXPECT_EQ(RelativeBucket(distance, 32, 128, false), backwards.at(i))
        << distance;
  }
}

// 8 * (128 / 8) ^ (k / 8) is a whole number for k = 2, 4 and 6.
TEST(RelativeBucketTest, AWholeNumberBeginsItsBucket) {
  for (const auto& [distance, bucket] :
       {std::pair{15, 9u}, {16, 10}, {31, 11}, {32, 12}, {63, 13}, {64, 14}}) {
    EXPECT_EQ(RelativeBucket(-distance, 32, 128, true), bucket) << distance;
  }
}

ModelConfig SmallT5() {
  ModelConfig config = SmallConfig();
  config.positions = PositionKind::kRelative;
  config.encoder_layers = 2;
  config.relative_buckets = 32;
  config.relative_max_distance = 128;
  return config;
}

TEST(CheckConfigTest, RefusesAnEncoderThatCannotBeComputed) {
  PC_EXPECT_OK(CheckConfig(SmallT5()));
  struct Damage {
    void (*apply)(ModelConfig&);
    const char* message;
  };
  const Damage damages[] = {
      {[](ModelConfig& c) { c.encoder_layers = 0; }, "relative positions"},
      {[](ModelConfig& c) { c.positions = PositionKind::kAlibi; },
       "relative positions"},
      {[](ModelConfig& c) { c.relative_buckets = 2; }, "2 buckets"},
      {[](ModelConfig& c) { c.relative_buckets = 31; }, "31 buckets"},
      {[](ModelConfig& c) { c.relative_max_distance = 16; }, "up to 16"},
      {[](ModelConfig& c) { c.relative_max_distance = 1 << 20; },
       "up to 1048576"},
      {[](ModelConfig& c) { c.norm = NormKind::kLayer; }, "than T5's"},
  };
  for (const Damage& damage : damages) {
    ModelConfig config = SmallT5();
    damage.apply(config);
    EXPECT_THAT(CheckConfig(config),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(damage.message)));
  }
}

TEST(CheckConfigTest, RefusesWhatCannotBeComputed) {
  PC_EXPECT_OK(CheckConfig(SmallConfig()));
  struct Damage {
    void (*apply)(ModelConfig&);
    const char* message;
  };
  const Damage damages[] = {
      {[](ModelConfig& c) { c.num_layers = 0; }, "dimension of 0"},
      {[](ModelConfig& c) { c.num_kv_heads = 3; }, "4 heads do not divide"},
      {[](ModelConfig& c) { c.head_dim = 24; }, "head_dim 24"},
      {[](ModelConfig& c) { c.rope.dims = 34; }, "RoPE over 34"},
      {[](ModelConfig& c) { c.layer_windows = {16}; }, "1 windows for 2"},
      {[](ModelConfig& c) {
         c.residual = ResidualKind::kParallel;
         c.post_norms = true;
       },
       "parallel residual"},
      {[](ModelConfig& c) { c.attention_scale = -1; }, "attention scale -1"},
      {[](ModelConfig& c) {
         c.positions = PositionKind::kAlibi;
         c.alibi_max_bias = 0;
       },
       "largest bias of 0"},
  };
  for (const Damage& damage : damages) {
    ModelConfig config = SmallConfig();
    damage.apply(config);
    EXPECT_THAT(CheckConfig(config),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(damage.message)));
  }
}

}  // namespace
}  // namespace promptcache::worker
