#include "inference_worker/model/gguf_llama.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kPrefix = "llama.";

// Bounds on what a damaged file can make the engine allocate.
constexpr uint32_t kMaxLayers = 4096;
constexpr uint32_t kMaxDim = 1 << 24;
constexpr uint32_t kMaxContext = 1 << 27;

std::string Key(std::string_view suffix) {
  return absl::StrCat(ToAbsl(kPrefix), ToAbsl(suffix));
}

// Keys that read_config reads, and keys that change nothing that is computed.
constexpr std::array<std::string_view, 15> kKnownKeys = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
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

absl::Status RefuseUnknownFeatures(const GgufFile& file) {
  for (const auto& [key, value] : file.metadata()) {
    if (!key.starts_with(kPrefix)) continue;
    const std::string_view suffix = key.substr(kPrefix.size());
    const bool known = std::find(kKnownKeys.begin(), kKnownKeys.end(),
                                 suffix) != kKnownKeys.end();
    if (known || IsNeutral(suffix, value)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", ToAbsl(key), ": ", DescribeGgufValue(value),
                     " is not supported"));
  }
  const std::string scaling_key = Key("rope.scaling.type");
  if (file.Find(scaling_key) != nullptr) {
    PC_ASSIGN_OR_RETURN(const std::string scaling, file.String(scaling_key));
    if (scaling != "none") {
      return absl::InvalidArgumentError(
          absl::StrCat("metadata ", scaling_key, ": ",
                       DescribeGgufValue(*file.Find(scaling_key)),
                       " is not supported; only \"none\" is"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> Dimension(const GgufFile& file,
                                   std::string_view suffix, uint32_t max,
                                   std::optional<uint32_t> fallback = {}) {
  const std::string key = Key(suffix);
  if (fallback.has_value() && file.Find(key) == nullptr) return *fallback;
  PC_ASSIGN_OR_RETURN(const uint32_t value, file.Uint32(key));
  if (value == 0 || value > max) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", key, ": ", value, " is not from 1 to ", max));
  }
  return value;
}

absl::StatusOr<float> PositiveFloat(const GgufFile& file,
                                    std::string_view suffix,
                                    std::optional<float> fallback = {}) {
  const std::string key = Key(suffix);
  if (fallback.has_value() && file.Find(key) == nullptr) return *fallback;
  PC_ASSIGN_OR_RETURN(const float value, file.Float(key));
  if (!std::isfinite(value) || value <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", key, ": ", value, " is not a positive number"));
  }
  return value;
}

absl::Status ReadHeads(const GgufFile& file, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(config->num_heads,
                      Dimension(file, "attention.head_count", kMaxDim));
  PC_ASSIGN_OR_RETURN(
      config->num_kv_heads,
      Dimension(file, "attention.head_count_kv", kMaxDim, config->num_heads));
  if (config->num_heads % config->num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("attention.head_count"), ": ", config->num_heads,
        " is not a multiple of the ", config->num_kv_heads, " KV heads"));
  }
  const std::string head_dim_key = Key("attention.key_length");
  if (file.Find(head_dim_key) == nullptr &&
      config->hidden_dim % config->num_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("embedding_length"), ": ", config->hidden_dim,
        " is not a multiple of the ", config->num_heads, " heads"));
  }
  PC_ASSIGN_OR_RETURN(config->head_dim,
                      Dimension(file, "attention.key_length", kMaxDim,
                                config->hidden_dim / config->num_heads));
  PC_ASSIGN_OR_RETURN(
      const uint32_t value_dim,
      Dimension(file, "attention.value_length", kMaxDim, config->head_dim));
  if (value_dim != config->head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata ", Key("attention.value_length"), ": ", value_dim,
        " is not the length of keys, ", config->head_dim));
  }
  return absl::OkStatus();
}

absl::Status ReadRope(const GgufFile& file, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  // Converters permute the rows of wq and wk for this architecture.
  rope.pairing = RopePairing::kInterleaved;
  PC_ASSIGN_OR_RETURN(rope.theta,
                      PositiveFloat(file, "rope.freq_base", 10000.0f));
  PC_ASSIGN_OR_RETURN(rope.dims, Dimension(file, "rope.dimension_count",
                                           kMaxDim, config->head_dim));
  if (rope.dims > config->head_dim || rope.dims % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", Key("rope.dimension_count"), ": ", rope.dims,
                     " is not even or exceeds the head's ", config->head_dim));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ReadLlamaConfig(const GgufFile& file) {
  PC_RETURN_IF_ERROR(RefuseUnknownFeatures(file));
  ModelConfig config;
  config.architecture = "llama";
  PC_ASSIGN_OR_RETURN(config.num_layers,
                      Dimension(file, "block_count", kMaxLayers));
  PC_ASSIGN_OR_RETURN(config.hidden_dim,
                      Dimension(file, "embedding_length", kMaxDim));
  PC_ASSIGN_OR_RETURN(config.ffn_dim,
                      Dimension(file, "feed_forward_length", kMaxDim));
  PC_ASSIGN_OR_RETURN(config.context_length,
                      Dimension(file, "context_length", kMaxContext));
  PC_ASSIGN_OR_RETURN(config.norm_epsilon,
                      PositiveFloat(file, "attention.layer_norm_rms_epsilon"));
  PC_RETURN_IF_ERROR(ReadHeads(file, &config));
  PC_RETURN_IF_ERROR(ReadRope(file, &config));
  return config;
}

TensorShape Norm(const ModelConfig& c) { return {1, c.hidden_dim}; }
TensorShape Vocabulary(const ModelConfig& c) {
  return {c.vocab_size, c.hidden_dim};
}
uint64_t QueryDim(const ModelConfig& c) {
  return uint64_t{c.num_heads} * c.head_dim;
}
TensorShape Query(const ModelConfig& c) { return {QueryDim(c), c.hidden_dim}; }
TensorShape KeyValue(const ModelConfig& c) {
  return {uint64_t{c.num_kv_heads} * c.head_dim, c.hidden_dim};
}
TensorShape AttentionOut(const ModelConfig& c) {
  return {c.hidden_dim, QueryDim(c)};
}
TensorShape FfnIn(const ModelConfig& c) { return {c.ffn_dim, c.hidden_dim}; }
TensorShape FfnOut(const ModelConfig& c) { return {c.hidden_dim, c.ffn_dim}; }

constexpr bool kPerLayer = true;
constexpr bool kOptional = true;
constexpr std::array<TensorRule, 12> kTensors = {{
    {TensorRole::kTokenEmbedding, "token_embd.weight", false, false,
     Vocabulary},
    {TensorRole::kOutputNorm, "output_norm.weight", false, false, Norm},
    {TensorRole::kOutput, "output.weight", false, kOptional, Vocabulary},
    {TensorRole::kAttentionNorm, "attn_norm.weight", kPerLayer, false, Norm},
    {TensorRole::kQuery, "attn_q.weight", kPerLayer, false, Query},
    {TensorRole::kKey, "attn_k.weight", kPerLayer, false, KeyValue},
    {TensorRole::kValue, "attn_v.weight", kPerLayer, false, KeyValue},
    {TensorRole::kAttentionOut, "attn_output.weight", kPerLayer, false,
     AttentionOut},
    {TensorRole::kFfnNorm, "ffn_norm.weight", kPerLayer, false, Norm},
    {TensorRole::kFfnGate, "ffn_gate.weight", kPerLayer, false, FfnIn},
    {TensorRole::kFfnUp, "ffn_up.weight", kPerLayer, false, FfnIn},
    {TensorRole::kFfnDown, "ffn_down.weight", kPerLayer, false, FfnOut},
}};

constexpr GgufFamily kLlama = {"llama", ReadLlamaConfig, kTensors};

}  // namespace

const GgufFamily& LlamaFamily() { return kLlama; }

}  // namespace promptcache::worker
