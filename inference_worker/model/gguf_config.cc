#include <algorithm>
#include <array>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

// Keys that the functions below read, and keys that change nothing that is
// computed.
constexpr std::array<std::string_view, 14> kCommonKeys = {
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
    "rope.scaling.type",                     // only "none", see below
    "rope.scaling.original_context_length",  // of the scaling
    "rope.scaling.finetuned",                // of the scaling
};

// Keys that name something we do not compute unless they hold the value that
// stands for "not in use". Any other key of the architecture is refused.
bool IsNeutral(std::string_view suffix, const GgufValue& value) {
  const std::string text = DescribeGgufValue(value);
  if (suffix == "attention.causal") return text == "true";
  if (suffix == "rope.scaling.factor" || suffix == "rope.scale_linear" ||
      suffix == "rope.scaling.attn_factor" || suffix == "logit_scale" ||
      suffix == "residual_scale" || suffix == "embedding_scale") {
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

absl::Status GgufConfig::ReadRope(ModelConfig* config) const {
  RopeConfig& rope = config->rope;
  PC_ASSIGN_OR_RETURN(rope.theta, PositiveFloat("rope.freq_base", 10000.0f));
  PC_ASSIGN_OR_RETURN(
      rope.dims, Dimension("rope.dimension_count", kMaxDim, config->head_dim));
  if (rope.dims > config->head_dim || rope.dims % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", Key("rope.dimension_count"), ": ", rope.dims,
                     " is not even or exceeds the head's ", config->head_dim));
  }
  const std::string scaling_key = Key("rope.scaling.type");
  if (file_.Find(scaling_key) != nullptr) {
    PC_ASSIGN_OR_RETURN(const std::string scaling, file_.String(scaling_key));
    if (scaling != "none") {
      return absl::InvalidArgumentError(
          absl::StrCat("metadata ", scaling_key, ": ",
                       DescribeGgufValue(*file_.Find(scaling_key)),
                       " is not supported; only \"none\" is"));
    }
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
