#include "inference_worker/engine/families/positions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/rope_table.h"

namespace promptcache::worker {
namespace {

constexpr double kTurn = 2 * std::numbers::pi;

absl::Status CheckDivisors(const RopeConfig& rope) {
  bool sane = rope.scaling.divisors.size() == rope.dims / 2;
  for (const float d : rope.scaling.divisors) {
    sane = sane && std::isfinite(d) && d > 0;
  }
  if (sane) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("RoPE scaling: ", rope.scaling.divisors.size(),
                   " divisors, must be ", rope.dims / 2, " positive numbers"));
}

// Computed by who made the file; LongRoPE has them only so.
bool HasDivisors(const RopeScaling& s) {
  return s.kind == RopeScalingKind::kLongRope ||
         (s.kind == RopeScalingKind::kLlama3 && !s.divisors.empty());
}

absl::Status CheckScaling(const RopeConfig& rope) {
  const RopeScaling& s = rope.scaling;
  if (HasDivisors(s)) return CheckDivisors(rope);
  const bool stretched =
      s.kind == RopeScalingKind::kLlama3 || s.kind == RopeScalingKind::kYarn;
  bool sane = std::isfinite(s.factor) && s.factor > 0 &&
              std::isfinite(s.attention_factor) && s.attention_factor >= 0;
  if (stretched) sane = sane && s.original_context > 0;
  if (s.kind == RopeScalingKind::kLlama3) {
    sane =
        sane && s.low_freq_factor > 0 && s.high_freq_factor > s.low_freq_factor;
  }
  if (s.kind == RopeScalingKind::kYarn) {
    sane = sane && s.beta_slow > 0 && s.beta_fast > s.beta_slow;
  }
  if (sane) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "RoPE scaling out of range: factor ", s.factor, ", original context ",
      s.original_context, ", low and high frequency factors ",
      s.low_freq_factor, " and ", s.high_freq_factor, ", beta ", s.beta_fast,
      " and ", s.beta_slow, ", attention factor ", s.attention_factor));
}

void Divide(const RopeScaling& s, std::vector<double>& inv_freq) {
  for (size_t i = 0; i < inv_freq.size(); ++i) inv_freq[i] /= s.divisors[i];
}

// Frequencies that turn less than low_freq_factor times within the original
// context are divided, those of more than high_freq_factor turns kept.
void ScaleLlama3(const RopeScaling& s, std::vector<double>& inv_freq) {
  if (!s.divisors.empty()) return Divide(s, inv_freq);
  for (double& f : inv_freq) {
    const double turns = s.original_context * f / kTurn;
    const double kept =
        std::clamp((turns - s.low_freq_factor) /
                       (double{s.high_freq_factor} - double{s.low_freq_factor}),
                   0.0, 1.0);
    f = kept * f + (1 - kept) * f / s.factor;
  }
}

// The pair that turns `turns` times within the original context.
double PairOfTurns(const RopeConfig& rope, double theta, double turns) {
  return rope.dims * std::log(rope.scaling.original_context / (turns * kTurn)) /
         (2 * std::log(theta));
}

// A ramp over pairs: those before beta_fast's are kept, those after
// beta_slow's divided.
void ScaleYarn(const RopeConfig& rope, double theta,
               std::vector<double>& inv_freq) {
  const RopeScaling& s = rope.scaling;
  const double low =
      std::max(std::floor(PairOfTurns(rope, theta, s.beta_fast)), 0.0);
  double high = std::min(std::ceil(PairOfTurns(rope, theta, s.beta_slow)),
                         static_cast<double>(rope.dims) - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double divided =
        std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] *= 1 - divided + divided / s.factor;
  }
}

double YarnFactor(const RopeScaling& s) {
  if (s.attention_factor > 0) return s.attention_factor;
  return s.factor > 1 ? 0.1 * std::log(double{s.factor}) + 1 : 1;
}

}  // namespace

absl::StatusOr<Rotation> RotationOf(const ModelConfig& config, bool local) {
  const RopeConfig& rope = config.rope;
  const double theta = local ? config.local_rope_theta : rope.theta;
  Rotation rotation = {.inv_freq =
                           cpu::RopeTable::PlainFrequencies(theta, rope.dims)};
  if (local) return rotation;
  PC_RETURN_IF_ERROR(CheckScaling(rope));
  switch (rope.scaling.kind) {
    case RopeScalingKind::kNone:
      break;
    case RopeScalingKind::kLinear:
      for (double& f : rotation.inv_freq) f /= rope.scaling.factor;
      break;
    case RopeScalingKind::kLlama3:
      ScaleLlama3(rope.scaling, rotation.inv_freq);
      break;
    case RopeScalingKind::kYarn:
      ScaleYarn(rope, theta, rotation.inv_freq);
      rotation.factor = YarnFactor(rope.scaling);
      break;
    case RopeScalingKind::kDynamicNtk:
      break;  // plain within the original context: UsableContext
    case RopeScalingKind::kLongRope:
      // Of requests within the original context: UsableContext.
      Divide(rope.scaling, rotation.inv_freq);
      if (rope.scaling.attention_factor > 0) {
        rotation.factor = rope.scaling.attention_factor;
      }
      break;
  }
  return rotation;
}

std::vector<float> AlibiSlopes(const ModelConfig& config) {
  const uint32_t heads = config.num_heads;
  const uint32_t whole = std::bit_ceil(heads);
  const double scale =
      config.alibi_before_scale ? double{AttentionScale(config)} : 1.0;
  std::vector<float> slopes;
  const auto add = [&](uint32_t index) {
    const double exponent = double{config.alibi_max_bias} * index / whole;
    slopes.push_back(static_cast<float>(std::exp2(-exponent) * scale));
  };
  if (whole == heads) {
    for (uint32_t i = 1; i <= heads; ++i) add(i);
    return slopes;
  }
  for (uint32_t i = 2; i <= whole && slopes.size() < heads; i += 2) add(i);
  for (uint32_t i = 1; slopes.size() < heads; i += 2) add(i);
  return slopes;
}

float AttentionScale(const ModelConfig& config) {
  if (config.attention_scale > 0) return config.attention_scale;
  return 1.0f / std::sqrt(static_cast<float>(config.head_dim));
}

}  // namespace promptcache::worker
