// T5 1.0 and 1.1 (Flan-T5 among them), and mT5, which is the same as 1.1.
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/hf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

absl::Status ReadDimensions(const HfConfig& file, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(config->encoder_layers,
                      file.Dimension("num_layers", kMaxLayers));
  PC_ASSIGN_OR_RETURN(
      config->num_layers,
      file.Dimension("num_decoder_layers", kMaxLayers, config->encoder_layers));
  PC_ASSIGN_OR_RETURN(config->hidden_dim, file.Dimension("d_model", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->num_heads, file.Dimension("num_heads", kMaxDim));
  config->num_kv_heads = config->num_heads;
  PC_ASSIGN_OR_RETURN(config->head_dim, file.Dimension("d_kv", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->ffn_dim, file.Dimension("d_ff", kMaxDim));
  PC_ASSIGN_OR_RETURN(config->vocab_size,
                      file.Dimension("vocab_size", kMaxDim));
  config->context_length = kT5Context;
  PC_ASSIGN_OR_RETURN(config->norm_epsilon,
                      file.PositiveFloat("layer_norm_epsilon", 1e-6f));
  config->positions = PositionKind::kRelative;
  config->attention_scale = 1;  // it is in the weights
  PC_ASSIGN_OR_RETURN(
      config->relative_buckets,
      file.Dimension("relative_attention_num_buckets", kMaxContext, 32));
  PC_ASSIGN_OR_RETURN(
      config->relative_max_distance,
      file.Dimension("relative_attention_max_distance", kMaxContext, 128));
  return absl::OkStatus();
}

// "relu", or "gated-" and the name of an activation.
absl::Status ReadFeedForward(const HfConfig& file, ModelConfig* config) {
  constexpr std::string_view kKey = "feed_forward_proj";
  PC_ASSIGN_OR_RETURN(const std::string projection, file.String(kKey, "relu"));
  if (projection == "relu") {
    config->activation = Activation::kRelu;
  } else if (projection == "gated-gelu") {
    config->activation = Activation::kGeluTanh;
  } else if (projection == "gated-silu") {
    config->activation = Activation::kSilu;
  } else {
    return file.Unsupported(kKey, "supported: relu, gated-gelu, gated-silu");
  }
  config->gated_ffn = projection != "relu";
  // What newer versions write beside it must say the same.
  PC_RETURN_IF_ERROR(file.RequireBool("is_gated_act", config->gated_ffn));
  if (!file.Has("dense_act_fn")) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const Activation activation,
                      ReadHfActivation(file, "dense_act_fn", ""));
  if (activation != config->activation) {
    return file.Unsupported(
        "dense_act_fn", absl::StrCat("with ", ToAbsl(kKey), " ", projection));
  }
  return absl::OkStatus();
}

// What the decoder begins with: its own key, or the padding.
absl::Status ReadStart(const HfConfig& file, ModelConfig* config) {
  const std::string_view key = file.Has("decoder_start_token_id")
                                   ? "decoder_start_token_id"
                                   : "pad_token_id";
  const nlohmann::json* id = file.Find(key);
  if (id == nullptr || !id->is_number_unsigned() ||
      id->get<uint64_t>() >= config->vocab_size) {
    return file.Unsupported(key, "it must be a token of the vocabulary");
  }
  config->decoder_start_token = id->get<int32_t>();
  return absl::OkStatus();
}

struct WeightAdder {
  RuleWriter& rules;
  void operator()(TensorRole role, std::string_view prefix,
                  std::string_view name) const {
    rules.Add(role, std::string(prefix) + std::string(name) + ".weight");
  }
};

void AddEncoder(RuleWriter& rules, bool gated) {
  using enum TensorRole;
  constexpr std::string_view kAttention =
      "encoder.block.{}.layer.0.SelfAttention.";
  constexpr std::string_view kFfn = "encoder.block.{}.layer.1.DenseReluDense.";
  const WeightAdder add{rules};
  add(kEncoderOutputNorm, "encoder.", "final_layer_norm");
  add(kEncoderRelativeBias, "encoder.block.0.layer.0.SelfAttention.",
      "relative_attention_bias");
  add(kEncoderAttentionNorm, "encoder.block.{}.layer.0.", "layer_norm");
  add(kEncoderQuery, kAttention, "q");
  add(kEncoderKey, kAttention, "k");
  add(kEncoderValue, kAttention, "v");
  add(kEncoderAttentionOut, kAttention, "o");
  add(kEncoderFfnNorm, "encoder.block.{}.layer.1.", "layer_norm");
  if (gated) add(kEncoderFfnGate, kFfn, "wi_0");
  add(kEncoderFfnUp, kFfn, gated ? "wi_1" : "wi");
  add(kEncoderFfnDown, kFfn, "wo");
}

void AddDecoder(RuleWriter& rules, bool gated) {
  using enum TensorRole;
  constexpr std::string_view kSelf = "decoder.block.{}.layer.0.SelfAttention.";
  constexpr std::string_view kCross =
      "decoder.block.{}.layer.1.EncDecAttention.";
  constexpr std::string_view kFfn = "decoder.block.{}.layer.2.DenseReluDense.";
  const WeightAdder add{rules};
  add(kOutputNorm, "decoder.", "final_layer_norm");
  add(kRelativeBias, "decoder.block.0.layer.0.SelfAttention.",
      "relative_attention_bias");
  add(kAttentionNorm, "decoder.block.{}.layer.0.", "layer_norm");
  add(kQuery, kSelf, "q");
  add(kKey, kSelf, "k");
  add(kValue, kSelf, "v");
  add(kAttentionOut, kSelf, "o");
  add(kCrossNorm, "decoder.block.{}.layer.1.", "layer_norm");
  add(kCrossQuery, kCross, "q");
  add(kCrossKey, kCross, "k");
  add(kCrossValue, kCross, "v");
  add(kCrossOut, kCross, "o");
  add(kFfnNorm, "decoder.block.{}.layer.2.", "layer_norm");
  if (gated) add(kFfnGate, kFfn, "wi_0");
  add(kFfnUp, kFfn, gated ? "wi_1" : "wi");
  add(kFfnDown, kFfn, "wo");
}

}  // namespace

absl::StatusOr<ModelLayout> ReadHfT5(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  config.architecture = "t5";
  PC_RETURN_IF_ERROR(ReadDimensions(file, &config));
  PC_RETURN_IF_ERROR(ReadFeedForward(file, &config));
  PC_RETURN_IF_ERROR(ReadStart(file, &config));

  // Copies of the embedding, and a table that no version reads.
  layout.ignored_endings = {
      "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
      "layer.1.EncDecAttention.relative_attention_bias.weight"};
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "shared.weight");
  AddEncoder(rules, config.gated_ffn);
  AddDecoder(rules, config.gated_ffn);
  PC_RETURN_IF_ERROR(AddHfOutput(file, true, "lm_head.weight", &layout));
  PC_ASSIGN_OR_RETURN(const bool scaled, file.Bool("scale_decoder_outputs",
                                                   config.tied_embeddings));
  if (scaled) {
    config.output_scale =
        1.0f / std::sqrt(static_cast<float>(config.hidden_dim));
  }
  return layout;
}

}  // namespace promptcache::worker
