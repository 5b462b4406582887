// Llama and what descends from it: Mistral, Qwen 2 and 3, Gemma 3, Phi-3.
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/float_types.h"
#include "common/status_macros.h"
#include "inference_worker/model/hf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

constexpr float kRopeTheta = 10000.0f;
constexpr float kWholeHead = 1.0f;  // rotated

bool AllLayers(uint32_t, uint32_t) { return true; }

// The fields that all of these have in the same place; not the rotation.
absl::Status ReadCommon(const HfConfig& file, std::string_view architecture,
                        uint32_t default_head_dim, ModelConfig* config) {
  config->architecture = architecture;
  PC_RETURN_IF_ERROR(ReadHfDimensions(file, {}, default_head_dim, config));
  PC_ASSIGN_OR_RETURN(config->ffn_dim,
                      file.Dimension("intermediate_size", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->norm_epsilon,
                      file.PositiveFloat("rms_norm_eps", 1e-6f));
  return absl::OkStatus();
}

struct Biases {
  bool qkv = false;
  bool out = false;
};

// Embedding, output norm and head, and every layer's norms and matrices but
// for those that Phi-3 fuses.
absl::Status AddModelTensors(const HfConfig& file, bool default_tied,
                             ModelLayout* layout) {
  layout->optional_prefix = "model.";
  layout->ignored_endings.emplace_back(".rotary_emb.inv_freq");
  RuleWriter rules(layout);
  rules.Add(TensorRole::kTokenEmbedding, "model.embed_tokens.weight");
  rules.Add(TensorRole::kOutputNorm, "model.norm.weight");
  rules.Add(TensorRole::kAttentionNorm,
            "model.layers.{}.input_layernorm.weight");
  rules.Add(TensorRole::kFfnDown, "model.layers.{}.mlp.down_proj.weight");
  return AddHfOutput(file, default_tied, "lm_head.weight", layout);
}

void AddSeparate(Biases biases, ModelLayout* layout) {
  RuleWriter rules(layout);
  rules.AddLinear(TensorRole::kQuery, "model.layers.{}.self_attn.q_proj",
                  biases.qkv);
  rules.AddLinear(TensorRole::kKey, "model.layers.{}.self_attn.k_proj",
                  biases.qkv);
  rules.AddLinear(TensorRole::kValue, "model.layers.{}.self_attn.v_proj",
                  biases.qkv);
  rules.AddLinear(TensorRole::kAttentionOut, "model.layers.{}.self_attn.o_proj",
                  biases.out);
  rules.Add(TensorRole::kFfnGate, "model.layers.{}.mlp.gate_proj.weight");
  rules.Add(TensorRole::kFfnUp, "model.layers.{}.mlp.up_proj.weight");
}

void AddFfnNorm(ModelLayout* layout) {
  RuleWriter(layout).Add(TensorRole::kFfnNorm,
                         "model.layers.{}.post_attention_layernorm.weight");
}

void AddHeadNorms(ModelLayout* layout) {
  RuleWriter rules(layout);
  rules.Add(TensorRole::kQueryNorm, "model.layers.{}.self_attn.q_norm.weight");
  rules.Add(TensorRole::kKeyNorm, "model.layers.{}.self_attn.k_norm.weight");
}

// 0 when the key is absent or null.
absl::StatusOr<uint32_t> SlidingWindow(const HfConfig& file,
                                       uint32_t fallback) {
  return file.Has("sliding_window")
             ? file.Dimension("sliding_window", kMaxContext)
             : fallback;
}

// Qwen's: off unless use_sliding_window, and then in the layers from
// max_window_layers on.
absl::Status ReadQwenWindows(const HfConfig& file, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(const bool used, file.Bool("use_sliding_window", false));
  if (!used) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const uint32_t window, SlidingWindow(file, 4096));
  uint32_t first = 28;
  if (const nlohmann::json* value = file.Find("max_window_layers")) {
    if (*value == 0) {
      first = 0;
    } else {
      PC_ASSIGN_OR_RETURN(first,
                          file.Dimension("max_window_layers", kMaxLayers));
    }
  }
  return ReadHfWindows(
      file, window, [](uint32_t layer, uint32_t from) { return layer >= from; },
      first, config);
}

// The square root as the library has it: in the type of the weights.
absl::StatusOr<float> EmbeddingScale(const HfConfig& file, uint32_t hidden) {
  const std::string_view key = file.Has("dtype") ? "dtype" : "torch_dtype";
  PC_ASSIGN_OR_RETURN(const std::string type, file.String(key, "float32"));
  const float scale = std::sqrt(static_cast<float>(hidden));
  if (type == "bfloat16") return Bf16ToFloat(FloatToBf16(scale));
  if (type == "float16") return HalfToFloat(FloatToHalf(scale));
  if (type == "float32") return scale;
  return file.Unsupported(key, "supported: bfloat16, float16, float32");
}

// Two bases: 5.x has an object for each kind of layer, 4.x a key for each.
absl::Status ReadGemmaRope(const HfConfig& file, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(config->local_rope_theta,
                      file.PositiveFloat("rope_local_base_freq", 10000.0f));
  constexpr float kGlobalTheta = 1e6f;
  const nlohmann::json* parameters = file.Find("rope_parameters");
  if (parameters == nullptr || !parameters->is_object() ||
      !parameters->contains("full_attention")) {
    return ReadHfRope(file, kGlobalTheta, kWholeHead, config);
  }
  const HfConfig all = file.Inside("rope_parameters");
  for (const std::string_view key : {"full_attention", "sliding_attention"}) {
    if (!all.Has(key) || !all.Find(key)->is_object()) {
      return all.Unsupported(key, "it must be an object");
    }
  }
  const HfConfig local = all.Inside("sliding_attention");
  PC_ASSIGN_OR_RETURN(const std::string local_type,
                      local.String("rope_type", "default"));
  if (local_type != "default") return local.Unsupported("rope_type", "");
  PC_ASSIGN_OR_RETURN(
      config->local_rope_theta,
      local.PositiveFloat("rope_theta", config->local_rope_theta));
  config->rope.theta = kGlobalTheta;
  return ReadHfRopeObject(file, all.Inside("full_attention"), kWholeHead,
                          config);
}

absl::Status ReadGemmaConfig(const HfConfig& file, ModelConfig* config) {
  PC_RETURN_IF_ERROR(ReadCommon(file, "gemma3", 256, config));
  PC_RETURN_IF_ERROR(file.RequireAbsent(
      {"attn_logit_softcapping", "final_logit_softcapping"}));
  PC_RETURN_IF_ERROR(file.RequireBool("use_bidirectional_attention", false));
  PC_ASSIGN_OR_RETURN(
      config->activation,
      ReadHfActivation(file, "hidden_activation", "gelu_pytorch_tanh"));
  PC_RETURN_IF_ERROR(ReadGemmaRope(file, config));
  PC_ASSIGN_OR_RETURN(const uint32_t window, SlidingWindow(file, 4096));
  const std::string_view pattern_key = file.Has("sliding_window_pattern")
                                           ? "sliding_window_pattern"
                                           : "_sliding_window_pattern";
  PC_ASSIGN_OR_RETURN(const uint32_t pattern,
                      file.Dimension(pattern_key, kMaxLayers, 6));
  PC_RETURN_IF_ERROR(ReadHfWindows(
      file, window,
      [](uint32_t layer, uint32_t every) { return (layer + 1) % every != 0; },
      pattern, config));
  PC_ASSIGN_OR_RETURN(const float scalar,
                      file.PositiveFloat("query_pre_attn_scalar", 256.0f));
  config->attention_scale = 1 / std::sqrt(scalar);
  PC_ASSIGN_OR_RETURN(config->embedding_scale,
                      EmbeddingScale(file, config->hidden_dim));
  config->norm_weight_offset = 1;
  config->qk_norm = true;
  config->post_norms = true;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelLayout> ReadHfLlama(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(ReadCommon(file, "llama", 0, &config));
  PC_RETURN_IF_ERROR(ReadHfRope(file, kRopeTheta, kWholeHead, &config));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "silu"));
  PC_RETURN_IF_ERROR(file.RequireBool("mlp_bias", false));
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("attention_bias", false));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/false, &layout));
  AddSeparate({.qkv = biased, .out = biased}, &layout);
  AddFfnNorm(&layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfMistral(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(ReadCommon(file, "mistral", 0, &config));
  PC_RETURN_IF_ERROR(ReadHfRope(file, kRopeTheta, kWholeHead, &config));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "silu"));
  PC_ASSIGN_OR_RETURN(const uint32_t window, SlidingWindow(file, 0));
  PC_RETURN_IF_ERROR(ReadHfWindows(file, window, AllLayers, 0, &config));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/false, &layout));
  AddSeparate({}, &layout);
  AddFfnNorm(&layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfQwen2(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(ReadCommon(file, "qwen2", 0, &config));
  PC_RETURN_IF_ERROR(ReadHfRope(file, kRopeTheta, kWholeHead, &config));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "silu"));
  PC_RETURN_IF_ERROR(ReadQwenWindows(file, &config));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/false, &layout));
  AddSeparate({.qkv = true}, &layout);
  AddFfnNorm(&layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfQwen3(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(ReadCommon(file, "qwen3", 128, &config));
  PC_RETURN_IF_ERROR(ReadHfRope(file, kRopeTheta, kWholeHead, &config));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "silu"));
  PC_RETURN_IF_ERROR(ReadQwenWindows(file, &config));
  config.qk_norm = true;
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("attention_bias", false));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/false, &layout));
  AddSeparate({.qkv = biased, .out = biased}, &layout);
  AddFfnNorm(&layout);
  AddHeadNorms(&layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfGemma3(const HfConfig& file) {
  ModelLayout layout;
  PC_RETURN_IF_ERROR(ReadGemmaConfig(file, &layout.config));
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("attention_bias", false));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/true, &layout));
  AddSeparate({.qkv = biased, .out = biased}, &layout);
  AddHeadNorms(&layout);
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kPostAttentionNorm,
            "model.layers.{}.post_attention_layernorm.weight");
  rules.Add(TensorRole::kFfnNorm,
            "model.layers.{}.pre_feedforward_layernorm.weight");
  rules.Add(TensorRole::kPostFfnNorm,
            "model.layers.{}.post_feedforward_layernorm.weight");
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfPhi3(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(ReadCommon(file, "phi3", 0, &config));
  PC_RETURN_IF_ERROR(ReadHfRope(file, kRopeTheta, kWholeHead, &config));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "silu"));
  PC_ASSIGN_OR_RETURN(const uint32_t window, SlidingWindow(file, 0));
  PC_RETURN_IF_ERROR(ReadHfWindows(file, window, AllLayers, 0, &config));
  PC_RETURN_IF_ERROR(file.RequireBool("attention_bias", false));
  PC_RETURN_IF_ERROR(AddModelTensors(file, /*default_tied=*/false, &layout));
  AddFfnNorm(&layout);
  RuleWriter rules(&layout);
  rules.AddStackedQkv("model.layers.{}.self_attn.qkv_proj", /*biased=*/false);
  rules.AddFused(
      {{TensorRole::kFfnGate, 0}, {TensorRole::kFfnUp, config.ffn_dim}},
      "model.layers.{}.mlp.gate_up_proj", /*biased=*/false);
  rules.Add(TensorRole::kAttentionOut,
            "model.layers.{}.self_attn.o_proj.weight");
  return layout;
}

}  // namespace promptcache::worker
