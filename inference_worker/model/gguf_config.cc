#include <algorithm>
#include <array>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf_family.h"
#include "inference_worker/model/gguf_tensors.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

// Keys that the functions below read, and keys that change nothing that is
// computed.
constexpr std::array<std::string_view, 20> kCommonKeys = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",  // the factor, in older files
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",  // only 1
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",  // says nothing about the computation
};

// Keys that name something we do not compute unless they hold the value that
// stands for "not in use". Any other key of the architecture is refused.
bool IsNeutral(std::string_view suffix, const GgufValue& value) {
  const std::string text = DescribeGgufValue(value);
  if (suffix == "attention.causal") return text == "true";
  if (suffix == "logit_scale" || suffix == "residual_scale" ||
      suffix == "embedding_scale") {
    return text == "1" || text == "0";
  }
  // expert_count, attention.sliding_window, attention.scale, ...
  return text == "0" || text == "false";
}

}  // namespace

std::string GgufConfig::Key(std::string_view suffix) const {
  return absl::StrCat(prefix_, ToAbsl(suffix));
}

bool GgufConfig::Has(std::string_view suffix) const {
  return file_.Find(Key(suffix)) != nullptr;
}

absl::Status GgufConfig::RefuseUnknown(
    std::span<const std::string_view> known) const {
  const auto is_in = [](auto list, std::string_view suffix) {
    return std::find(list.begin(), list.end(), suffix) != list.end();
  };
  for (const auto& [key, value] : file_.metadata()) {
    if (!key.starts_with(prefix_)) continue;
    const std::string_view suffix = key.substr(prefix_.size());
    if (is_in(std::span(kCommonKeys), suffix) || is_in(known, suffix) ||
        IsNeutral(suffix, value)) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", ToAbsl(key), ": ", DescribeGgufValue(value),
                     " is not supported"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> GgufConfig::Dimension(
    std::string_view suffix, uint32_t max,
    std::optional<uint32_t> fallback) const {
  const std::string key = Key(suffix);
  if (fallback.has_value() && file_.Find(key) == nullptr) return *fallback;
  PC_ASSIGN_OR_RETURN(const uint32_t value, file_.Uint32(key));
  if (value == 0 || value > max) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", key, ": ", value, " is not from 1 to ", max));
  }
  return value;
}

absl::StatusOr<float> GgufConfig::PositiveFloat(
    std::string_view suffix, std::optional<float> fallback) const {
  const std::string key = Key(suffix);
  if (fallback.has_value() && file_.Find(key) == nullptr) return *fallback;
  PC_ASSIGN_OR_RETURN(const float value, file_.Float(key));
  if (!std::isfinite(value) || value <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", key, ": ", value, " is not a positive number"));
  }
  return value;
}

absl::Status GgufConfig::ReadDimensions(std::string_view epsilon_key,
                                        ModelConfig* config) const {
  PC_ASSIGN_OR_RETURN(config->num_layers, Dimension("block_count", kMaxLayers));
  PC_ASSIGN_OR_RETURN(config->hidden_dim,
                      Dimension("embedding_length", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->ffn_dim,
                      Dimension("feed_forward_length", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->context_length,
                      Dimension("context_length", kMaxContext));
  PC_ASSIGN_OR_RETURN(config->norm_epsilon, PositiveFloat(epsilon_key));
  return ReadHeads(config);
}

absl::Status GgufConfig::ReadHeads(ModelConfig* config) const {
  PC_ASSIGN_OR_RETURN(config->num_heads,
                      Dimension("attention.head_count", kMaxDim));
  PC_ASSIGN_OR_RETURN(
      config->num_kv_heads,
      Dimension("attention.head_count_kv", kMaxDim, config->num_heads));
  if (config->num_heads % config->num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("attention.head_count"), ": ", config->num_heads,
        " is not a multiple of the ", config->num_kv_heads, " KV heads"));
  }
  if (!Has("attention.key_length") &&
      config->hidden_dim % config->num_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("embedding_length"), ": ", config->hidden_dim,
        " is not a multiple of the ", config->num_heads, " heads"));
  }
  PC_ASSIGN_OR_RETURN(config->head_dim,
                      Dimension("attention.key_length", kMaxDim,
                                config->hidden_dim / config->num_heads));
  PC_ASSIGN_OR_RETURN(
      const uint32_t value_dim,
      Dimension("attention.value_length", kMaxDim, config->head_dim));
  if (value_dim != config->head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("attention.value_length"), ": ", value_dim,
        " is not the length of keys, ", config->head_dim));
  }
  return absl::OkStatus();
}

absl::Status GgufConfig::ReadRope(ModelLayout* layout) const {
  ModelConfig& config = layout->config;
  RopeConfig& rope = config.rope;
  PC_ASSIGN_OR_RETURN(rope.theta, PositiveFloat("rope.freq_base", rope.theta));
  PC_ASSIGN_OR_RETURN(
      rope.dims, Dimension("rope.dimension_count", kMaxDim, config.head_dim));
  if (rope.dims > config.head_dim || rope.dims % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", Key("rope.dimension_count"), ": ", rope.dims,
                     " is not even or exceeds the head's ", config.head_dim));
  }
  PC_RETURN_IF_ERROR(ReadRopeScaling(&config));
  return ReadDivisors(layout);
}

absl::Status GgufConfig::ReadRopeScaling(ModelConfig* config) const {
  RopeScaling& scaling = config->rope.scaling;
  std::string type = "none";
  const std::string type_key = Key("rope.scaling.type");
  if (file_.Find(type_key) != nullptr) {
    PC_ASSIGN_OR_RETURN(type, file_.String(type_key));
  } else if (Has("rope.scale_linear")) {
    type = "linear";
  }
  const std::string_view factor_key =
      Has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  // 0 and 1 stand for none.
  float factor = 1;
  if (Has(factor_key)) {
    PC_ASSIGN_OR_RETURN(const float stated, file_.Float(Key(factor_key)));
    if (stated != 0) {
      PC_ASSIGN_OR_RETURN(factor, PositiveFloat(factor_key));
    }
  }
  if (type == "longrope") return absl::OkStatus();  // ReadDivisors
  if (type == "none" || (type == "linear" && factor == 1)) {
    if (factor == 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", Key(factor_key), ": ", factor,
                     " is not supported with scaling type \"none\""));
  }
  scaling.factor = factor;
  if (type == "linear") {
    scaling.kind = RopeScalingKind::kLinear;
    return absl::OkStatus();
  }
  if (type == "yarn") {
    scaling.kind = RopeScalingKind::kYarn;
    PC_ASSIGN_OR_RETURN(scaling.original_context,
                        Dimension("rope.scaling.original_context_length",
                                  kMaxContext, config->context_length));
    return ReadYarn(&scaling);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "metadata ", type_key, ": ", DescribeGgufValue(*file_.Find(type_key)),
      " is not supported; supported: none, linear, yarn, longrope"));
}

absl::Status GgufConfig::ReadYarn(RopeScaling* scaling) const {
  PC_ASSIGN_OR_RETURN(const float extension,
                      PositiveFloat("rope.scaling.yarn_ext_factor", 1.0f));
  if (extension != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", Key("rope.scaling.yarn_ext_factor"), ": ",
                     extension, " is not supported; only 1 is"));
  }
  PC_ASSIGN_OR_RETURN(scaling->beta_fast,
                      PositiveFloat("rope.scaling.yarn_beta_fast", 32.0f));
  PC_ASSIGN_OR_RETURN(scaling->beta_slow,
                      PositiveFloat("rope.scaling.yarn_beta_slow", 1.0f));
  // On top of the default, which it scales.
  PC_ASSIGN_OR_RETURN(const float factor,
                      PositiveFloat("rope.scaling.attn_factor", 1.0f));
  if (factor != 1) {
    scaling->attention_factor =
        factor * (0.1f * std::log(scaling->factor) + 1.0f);
  }
  return absl::OkStatus();
}

absl::Status GgufConfig::ReadPositiveVector(std::string_view name,
                                            ModelLayout* layout,
                                            std::vector<float>* out) const {
  for (const GgufTensor& tensor : file_.tensors()) {
    if (tensor.name != name) continue;
    PC_ASSIGN_OR_RETURN(
        *out, ReadGgufVector(file_, tensor, layout->config.rope.dims / 2));
    layout->ignored_endings.emplace_back(name);
    for (const float value : *out) {
      if (std::isfinite(value) && value > 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteGgufName(name), ": ", value,
                       " is not a positive number"));
    }
  }
  return absl::OkStatus();
}

// rope_freqs: the factors of llama3, computed. rope_factors_short and _long:
// those of longrope.
absl::Status GgufConfig::ReadDivisors(ModelLayout* layout) const {
  RopeScaling& scaling = layout->config.rope.scaling;
  PC_RETURN_IF_ERROR(
      ReadPositiveVector("rope_freqs.weight", layout, &scaling.divisors));
  if (!scaling.divisors.empty()) {
    if (scaling.kind != RopeScalingKind::kNone) {
      return absl::InvalidArgumentError(
          "tensor \"rope_freqs.weight\": is not supported with rope scaling");
    }
    scaling.kind = RopeScalingKind::kLlama3;
    return absl::OkStatus();
  }
  PC_RETURN_IF_ERROR(ReadPositiveVector("rope_factors_short.weight", layout,
                                        &scaling.divisors));
  PC_RETURN_IF_ERROR(ReadPositiveVector("rope_factors_long.weight", layout,
                                        &scaling.long_divisors));
  if (scaling.divisors.empty() != scaling.long_divisors.empty()) {
    return absl::InvalidArgumentError(
        "tensors rope_factors_short and rope_factors_long: one is missing");
  }
  if (scaling.divisors.empty()) return absl::OkStatus();
  scaling.kind = RopeScalingKind::kLongRope;
  PC_ASSIGN_OR_RETURN(
      scaling.original_context,
      Dimension("rope.scaling.original_context_length", kMaxContext));
  scaling.factor = static_cast<float>(layout->config.context_length) /
                   static_cast<float>(scaling.original_context);
  PC_ASSIGN_OR_RETURN(scaling.attention_factor,
                      PositiveFloat("rope.scaling.attn_factor", 1.0f));
  return absl::OkStatus();
}

}  // namespace promptcache::worker
