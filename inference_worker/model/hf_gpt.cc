// Models with layer norms and a plain feed-forward: Falcon, MPT, GPT-NeoX,
// GPT-2, OPT.
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/hf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

void UsePlainLayers(std::string_view architecture, ModelConfig* config) {
  config->architecture = architecture;
  config->norm = NormKind::kLayer;
  config->gated_ffn = false;
}

// Groups of `queries` heads of q, one of k and one of v, one group after the
// other: of Falcon by KV head, of GPT-NeoX by head.
void AddGroupedQkv(std::string_view name, bool biased, ModelLayout* layout) {
  const uint64_t dim = layout->config.head_dim;
  const uint64_t queries =
      layout->config.num_heads / layout->config.num_kv_heads * dim;
  const uint64_t stride = queries + 2 * dim;
  RuleWriter(layout).AddFused(
      {{TensorRole::kQuery, 0, queries, stride},
       {TensorRole::kKey, queries, dim, stride},
       {TensorRole::kValue, queries + dim, dim, stride}},
      name, biased);
}

// Falcon's KV heads by its three shapes of attention.
absl::Status ReadFalconHeads(const HfConfig& file, bool is_new,
                             ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(const bool multi_query, file.Bool("multi_query", true));
  if (is_new) {
    PC_ASSIGN_OR_RETURN(
        config->num_kv_heads,
        file.Dimension("num_kv_heads", kMaxDim, config->num_heads));
    if (config->num_heads % config->num_kv_heads != 0) {
      return file.Unsupported(
          "num_kv_heads",
          absl::StrCat("the ", config->num_heads, " heads are no multiple"));
    }
  } else if (multi_query) {
    config->num_kv_heads = 1;
  }
  return absl::OkStatus();
}

absl::Status ReadFalconPositions(const HfConfig& file, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(const bool alibi, file.Bool("alibi", false));
  if (!alibi) return ReadHfRope(file, 10000.0f, 1.0f, config);
  config->positions = PositionKind::kAlibi;
  config->alibi_before_scale = true;
  return absl::OkStatus();
}

// The norms before attention and feed-forward, and how the two are joined.
absl::Status AddFalconNorms(const HfConfig& file, bool is_new,
                            ModelLayout* layout) {
  ModelConfig& config = layout->config;
  RuleWriter rules(layout);
  PC_ASSIGN_OR_RETURN(const bool parallel, file.Bool("parallel_attn", true));
  if (!parallel) {
    if (is_new) {
      return file.Unsupported("parallel_attn", "with new_decoder_architecture");
    }
    rules.AddLinear(TensorRole::kAttentionNorm,
                    "transformer.h.{}.input_layernorm", true);
    rules.AddLinear(TensorRole::kFfnNorm,
                    "transformer.h.{}.post_attention_layernorm", true);
    return absl::OkStatus();
  }
  config.residual = ResidualKind::kParallel;
  constexpr std::string_view kNormsKey = "num_ln_in_parallel_attn";
  PC_ASSIGN_OR_RETURN(const uint32_t norms,
                      file.Dimension(kNormsKey, 2, is_new ? 2 : 1));
  if (norms == 2 && !is_new) {
    return file.Unsupported(kNormsKey, "without new_decoder_architecture");
  }
  config.shared_parallel_norm = norms == 1;
  if (config.shared_parallel_norm) {
    rules.AddLinear(TensorRole::kAttentionNorm,
                    "transformer.h.{}.input_layernorm", true);
  } else {
    rules.AddLinear(TensorRole::kAttentionNorm, "transformer.h.{}.ln_attn",
                    true);
    rules.AddLinear(TensorRole::kFfnNorm, "transformer.h.{}.ln_mlp", true);
  }
  return absl::OkStatus();
}

absl::Status ReadMptAttention(const HfConfig& file, ModelConfig* config) {
  const nlohmann::json* object = file.Find("attn_config");
  if (object == nullptr || !object->is_object()) {
    return file.Unsupported("attn_config", "it must be an object");
  }
  const HfConfig attention = file.Inside("attn_config");
  PC_RETURN_IF_ERROR(attention.RequireBool("alibi", true));
  PC_RETURN_IF_ERROR(attention.RequireBool("qk_ln", false));
  PC_RETURN_IF_ERROR(attention.RequireBool("prefix_lm", false));
  PC_RETURN_IF_ERROR(attention.RequireAbsent({"clip_qkv"}));
  PC_ASSIGN_OR_RETURN(const std::string type,
                      attention.String("attn_type", "multihead_attention"));
  if (type != "multihead_attention") {
    return attention.Unsupported("attn_type", "");
  }
  config->positions = PositionKind::kAlibi;
  PC_ASSIGN_OR_RETURN(config->alibi_max_bias,
                      attention.PositiveFloat("alibi_bias_max", 8.0f));
  if (attention.Has("softmax_scale")) {
    PC_ASSIGN_OR_RETURN(config->attention_scale,
                        attention.PositiveFloat("softmax_scale"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelLayout> ReadHfFalcon(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  UsePlainLayers("falcon", &config);
  PC_RETURN_IF_ERROR(
      ReadHfDimensions(file, {.kv_heads = "", .head_dim = ""}, 0, &config));
  PC_ASSIGN_OR_RETURN(const bool is_new,
                      file.Bool("new_decoder_architecture", false));
  PC_RETURN_IF_ERROR(ReadFalconHeads(file, is_new, &config));
  PC_RETURN_IF_ERROR(ReadFalconPositions(file, &config));
  const uint64_t default_ffn = uint64_t{config.hidden_dim} * 4;
  PC_ASSIGN_OR_RETURN(config.ffn_dim,
                      file.Dimension("ffn_hidden_size", kMaxDim,
                                     static_cast<uint32_t>(default_ffn)));
  PC_ASSIGN_OR_RETURN(config.norm_epsilon,
                      file.PositiveFloat("layer_norm_epsilon", 1e-5f));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "activation", "gelu"));
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("bias", false));

  layout.optional_prefix = "transformer.";
  layout.ignored_endings = {".rotary_emb.inv_freq", ".rotary.inv_freq"};
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "transformer.word_embeddings.weight");
  rules.AddLinear(TensorRole::kOutputNorm, "transformer.ln_f", true);
  PC_RETURN_IF_ERROR(AddFalconNorms(file, is_new, &layout));
  AddGroupedQkv("transformer.h.{}.self_attention.query_key_value", biased,
                &layout);
  rules.AddLinear(TensorRole::kAttentionOut,
                  "transformer.h.{}.self_attention.dense", biased);
  rules.AddLinear(TensorRole::kFfnUp, "transformer.h.{}.mlp.dense_h_to_4h",
                  biased);
  rules.AddLinear(TensorRole::kFfnDown, "transformer.h.{}.mlp.dense_4h_to_h",
                  biased);
  PC_RETURN_IF_ERROR(AddHfOutput(file, true, "lm_head.weight", &layout));
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfMpt(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  UsePlainLayers("mpt", &config);
  PC_RETURN_IF_ERROR(ReadHfDimensions(file,
                                      {.layers = "n_layers",
                                       .hidden = "d_model",
                                       .heads = "n_heads",
                                       .kv_heads = "",
                                       .head_dim = "",
                                       .context = "max_seq_len"},
                                      0, &config));
  PC_RETURN_IF_ERROR(ReadMptAttention(file, &config));
  PC_RETURN_IF_ERROR(file.RequireBool("no_bias", true));
  PC_RETURN_IF_ERROR(file.RequireAbsent({"logit_scale"}));
  PC_ASSIGN_OR_RETURN(
      const uint32_t expansion,
      file.Dimension("expansion_ratio", kMaxDim / config.hidden_dim, 4));
  config.ffn_dim = config.hidden_dim * expansion;
  PC_ASSIGN_OR_RETURN(config.norm_epsilon,
                      file.PositiveFloat("layer_norm_epsilon", 1e-5f));
  PC_ASSIGN_OR_RETURN(const std::string norm,
                      file.String("norm_type", "low_precision_layernorm"));
  if (norm != "low_precision_layernorm") {
    return file.Unsupported("norm_type", "only low_precision_layernorm is");
  }
  config.activation = Activation::kGelu;

  layout.optional_prefix = "transformer.";
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "transformer.wte.weight");
  rules.Add(TensorRole::kOutputNorm, "transformer.norm_f.weight");
  rules.Add(TensorRole::kAttentionNorm, "transformer.blocks.{}.norm_1.weight");
  rules.Add(TensorRole::kFfnNorm, "transformer.blocks.{}.norm_2.weight");
  rules.AddStackedQkv("transformer.blocks.{}.attn.Wqkv", false, false);
  rules.Add(TensorRole::kAttentionOut,
            "transformer.blocks.{}.attn.out_proj.weight");
  rules.Add(TensorRole::kFfnUp, "transformer.blocks.{}.ffn.up_proj.weight");
  rules.Add(TensorRole::kFfnDown, "transformer.blocks.{}.ffn.down_proj.weight");
  PC_RETURN_IF_ERROR(AddHfOutput(file, true, "lm_head.weight", &layout));
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfGptNeox(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  UsePlainLayers("gptneox", &config);
  PC_RETURN_IF_ERROR(
      ReadHfDimensions(file, {.kv_heads = "", .head_dim = ""}, 0, &config));
  PC_ASSIGN_OR_RETURN(config.ffn_dim,
                      file.Dimension("intermediate_size", kMaxDim));
  PC_ASSIGN_OR_RETURN(config.norm_epsilon,
                      file.PositiveFloat("layer_norm_eps", 1e-5f));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "hidden_act", "gelu"));
  PC_ASSIGN_OR_RETURN(const float theta,
                      file.PositiveFloat("rotary_emb_base", 10000.0f));
  PC_ASSIGN_OR_RETURN(const float partial,
                      file.PositiveFloat("rotary_pct", 0.25f));
  PC_RETURN_IF_ERROR(ReadHfRope(file, theta, partial, &config));
  PC_ASSIGN_OR_RETURN(const bool parallel,
                      file.Bool("use_parallel_residual", true));
  if (parallel) config.residual = ResidualKind::kParallel;
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("attention_bias", true));

  layout.optional_prefix = "gpt_neox.";
  layout.ignored_endings = {".attention.bias", ".attention.masked_bias",
                            ".rotary_emb.inv_freq"};
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "gpt_neox.embed_in.weight");
  rules.AddLinear(TensorRole::kOutputNorm, "gpt_neox.final_layer_norm", true);
  rules.AddLinear(TensorRole::kAttentionNorm,
                  "gpt_neox.layers.{}.input_layernorm", true);
  rules.AddLinear(TensorRole::kFfnNorm,
                  "gpt_neox.layers.{}.post_attention_layernorm", true);
  AddGroupedQkv("gpt_neox.layers.{}.attention.query_key_value", biased,
                &layout);
  rules.AddLinear(TensorRole::kAttentionOut,
                  "gpt_neox.layers.{}.attention.dense", biased);
  rules.AddLinear(TensorRole::kFfnUp, "gpt_neox.layers.{}.mlp.dense_h_to_4h",
                  true);
  rules.AddLinear(TensorRole::kFfnDown, "gpt_neox.layers.{}.mlp.dense_4h_to_h",
                  true);
  PC_RETURN_IF_ERROR(AddHfOutput(file, false, "embed_out.weight", &layout));
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfGpt2(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  UsePlainLayers("gpt2", &config);
  PC_RETURN_IF_ERROR(ReadHfDimensions(file,
                                      {.layers = "n_layer",
                                       .hidden = "n_embd",
                                       .heads = "n_head",
                                       .kv_heads = "",
                                       .head_dim = "",
                                       .context = "n_positions"},
                                      0, &config));
  config.positions = PositionKind::kLearned;
  PC_ASSIGN_OR_RETURN(config.ffn_dim, file.Dimension("n_inner", kMaxDim,
                                                     config.hidden_dim * 4));
  PC_ASSIGN_OR_RETURN(config.norm_epsilon,
                      file.PositiveFloat("layer_norm_epsilon", 1e-5f));
  PC_ASSIGN_OR_RETURN(
      config.activation,
      ReadHfActivation(file, "activation_function", "gelu_new"));
  PC_RETURN_IF_ERROR(file.RequireBool("scale_attn_weights", true));
  PC_RETURN_IF_ERROR(
      file.RequireBool("scale_attn_by_inverse_layer_idx", false));
  PC_RETURN_IF_ERROR(file.RequireBool("add_cross_attention", false));

  layout.optional_prefix = "transformer.";
  layout.ignored_endings = {".attn.bias", ".attn.masked_bias"};
  RuleWriter rules(&layout);
  // Its linear layers lie as [in, out].
  const auto add_transposed = [&rules](TensorRole role, std::string_view name) {
    rules.AddLinear(role, name, false);
    rules.last().transposed = true;
    rules.Add(BiasOf(role), std::string(name) + ".bias");
  };
  rules.Add(TensorRole::kTokenEmbedding, "transformer.wte.weight");
  rules.Add(TensorRole::kPositionEmbedding, "transformer.wpe.weight");
  rules.AddLinear(TensorRole::kOutputNorm, "transformer.ln_f", true);
  rules.AddLinear(TensorRole::kAttentionNorm, "transformer.h.{}.ln_1", true);
  rules.AddLinear(TensorRole::kFfnNorm, "transformer.h.{}.ln_2", true);
  rules.AddStackedQkv("transformer.h.{}.attn.c_attn", true, true);
  add_transposed(TensorRole::kAttentionOut, "transformer.h.{}.attn.c_proj");
  add_transposed(TensorRole::kFfnUp, "transformer.h.{}.mlp.c_fc");
  add_transposed(TensorRole::kFfnDown, "transformer.h.{}.mlp.c_proj");
  PC_RETURN_IF_ERROR(AddHfOutput(file, true, "lm_head.weight", &layout));
  return layout;
}

absl::StatusOr<ModelLayout> ReadHfOpt(const HfConfig& file) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  UsePlainLayers("opt", &config);
  PC_RETURN_IF_ERROR(
      ReadHfDimensions(file, {.kv_heads = "", .head_dim = ""}, 0, &config));
  config.positions = PositionKind::kLearned;
  config.position_table_offset = 2;
  PC_ASSIGN_OR_RETURN(config.ffn_dim, file.Dimension("ffn_dim", kMaxDim));
  PC_ASSIGN_OR_RETURN(config.activation,
                      ReadHfActivation(file, "activation_function", "relu"));
  PC_RETURN_IF_ERROR(file.RequireBool("do_layer_norm_before", true));
  PC_RETURN_IF_ERROR(file.RequireBool("_remove_final_layer_norm", false));
  PC_RETURN_IF_ERROR(file.RequireBool("layer_norm_elementwise_affine", true));
  PC_ASSIGN_OR_RETURN(
      const uint32_t embedding,
      file.Dimension("word_embed_proj_dim", kMaxDim, config.hidden_dim));
  if (embedding != config.hidden_dim) {
    return file.Unsupported("word_embed_proj_dim", "only hidden_size is");
  }
  PC_ASSIGN_OR_RETURN(const bool biased, file.Bool("enable_bias", true));

  layout.optional_prefix = "model.";
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "model.decoder.embed_tokens.weight");
  rules.Add(TensorRole::kPositionEmbedding,
            "model.decoder.embed_positions.weight");
  rules.AddLinear(TensorRole::kOutputNorm, "model.decoder.final_layer_norm",
                  true);
  rules.AddLinear(TensorRole::kAttentionNorm,
                  "model.decoder.layers.{}.self_attn_layer_norm", true);
  rules.AddLinear(TensorRole::kFfnNorm,
                  "model.decoder.layers.{}.final_layer_norm", true);
  rules.AddLinear(TensorRole::kQuery,
                  "model.decoder.layers.{}.self_attn.q_proj", biased);
  rules.AddLinear(TensorRole::kKey, "model.decoder.layers.{}.self_attn.k_proj",
                  biased);
  rules.AddLinear(TensorRole::kValue,
                  "model.decoder.layers.{}.self_attn.v_proj", biased);
  rules.AddLinear(TensorRole::kAttentionOut,
                  "model.decoder.layers.{}.self_attn.out_proj", biased);
  rules.AddLinear(TensorRole::kFfnUp, "model.decoder.layers.{}.fc1", biased);
  rules.AddLinear(TensorRole::kFfnDown, "model.decoder.layers.{}.fc2", biased);
  PC_RETURN_IF_ERROR(AddHfOutput(file, true, "lm_head.weight", &layout));
  return layout;
}

}  // namespace promptcache::worker
