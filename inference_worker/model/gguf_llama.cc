// Llama and what descends from it: Qwen 2 and 3, Gemma 3, Phi-3.
#include <array>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/gguf_family.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kEpsilon = "attention.layer_norm_rms_epsilon";
constexpr std::string_view kWindow = "attention.sliding_window";

struct Fused {
  bool qkv = false;
  bool gate_up = false;
};

// What all of these have under the same names.
void AddTensors(bool biased, Fused fused, ModelLayout* layout) {
  const ModelConfig& config = layout->config;
  RuleWriter rules(layout);
  rules.Add(TensorRole::kTokenEmbedding, "token_embd.weight");
  rules.Add(TensorRole::kOutputNorm, "output_norm.weight");
  rules.Add(TensorRole::kOutput, "output.weight").optional = true;
  rules.Add(TensorRole::kAttentionNorm, "blk.{}.attn_norm.weight");
  if (fused.qkv) {
    rules.AddStackedQkv("blk.{}.attn_qkv", /*biased=*/false);
  } else {
    rules.AddLinear(TensorRole::kQuery, "blk.{}.attn_q", biased);
    rules.AddLinear(TensorRole::kKey, "blk.{}.attn_k", biased);
    rules.AddLinear(TensorRole::kValue, "blk.{}.attn_v", biased);
  }
  rules.Add(TensorRole::kAttentionOut, "blk.{}.attn_output.weight");
  rules.Add(TensorRole::kFfnNorm, "blk.{}.ffn_norm.weight");
  if (fused.gate_up) {
    rules.AddFused(
        {{TensorRole::kFfnGate, 0}, {TensorRole::kFfnUp, config.ffn_dim}},
        "blk.{}.ffn_up", /*biased=*/false);
  } else {
    rules.Add(TensorRole::kFfnGate, "blk.{}.ffn_gate.weight");
    rules.Add(TensorRole::kFfnUp, "blk.{}.ffn_up.weight");
  }
  rules.Add(TensorRole::kFfnDown, "blk.{}.ffn_down.weight");
}

void AddHeadNorms(ModelLayout* layout) {
  layout->config.qk_norm = true;
  RuleWriter rules(layout);
  rules.Add(TensorRole::kQueryNorm, "blk.{}.attn_q_norm.weight");
  rules.Add(TensorRole::kKeyNorm, "blk.{}.attn_k_norm.weight");
}

absl::StatusOr<ModelLayout> ReadCommon(const GgufConfig& reader,
                                       std::string_view architecture,
                                       uint32_t vocab_size) {
  ModelLayout layout;
  layout.config.architecture = architecture;
  layout.config.vocab_size = vocab_size;
  PC_RETURN_IF_ERROR(reader.ReadDimensions(kEpsilon, &layout.config));
  PC_RETURN_IF_ERROR(reader.ReadRope(&layout));
  return layout;
}

// Every layer but each sixth sees a window.
absl::Status ReadGemmaWindows(const GgufConfig& reader, ModelConfig* config) {
  if (!reader.Has(kWindow)) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const uint32_t window,
                      reader.Dimension(kWindow, kMaxContext));
  PC_ASSIGN_OR_RETURN(
      const uint32_t every,
      reader.Dimension("attention.sliding_window_pattern", kMaxLayers, 6));
  for (uint32_t layer = 0; layer < config->num_layers; ++layer) {
    config->layer_windows.push_back((layer + 1) % every == 0 ? 0 : window);
  }
  PC_ASSIGN_OR_RETURN(config->local_rope_theta,
                      reader.PositiveFloat("rope.freq_base_swa", 10000.0f));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelLayout> ReadGgufLlama(const GgufFile& file,
                                          uint32_t vocab_size) {
  constexpr std::array kKeys = {kEpsilon};
  const GgufConfig reader(file, "llama");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "llama", vocab_size));
  // Converters permute the rows of wq and wk for this architecture.
  layout.config.rope.pairing = RopePairing::kInterleaved;
  AddTensors(/*biased=*/false, {}, &layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufQwen2(const GgufFile& file,
                                          uint32_t vocab_size) {
  constexpr std::array kKeys = {kEpsilon};
  const GgufConfig reader(file, "qwen2");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "qwen2", vocab_size));
  AddTensors(/*biased=*/true, {}, &layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufQwen3(const GgufFile& file,
                                          uint32_t vocab_size) {
  constexpr std::array kKeys = {kEpsilon};
  const GgufConfig reader(file, "qwen3");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "qwen3", vocab_size));
  AddTensors(/*biased=*/false, {}, &layout);
  AddHeadNorms(&layout);
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufGemma3(const GgufFile& file,
                                           uint32_t vocab_size) {
  constexpr std::array<std::string_view, 4> kKeys = {
      kEpsilon, kWindow, "attention.sliding_window_pattern",
      "rope.freq_base_swa"};
  const GgufConfig reader(file, "gemma3");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  ModelLayout layout;
  ModelConfig& config = layout.config;
  config.architecture = "gemma3";
  config.vocab_size = vocab_size;
  // Older files leave the base out.
  config.rope.theta = 1e6f;
  PC_RETURN_IF_ERROR(reader.ReadDimensions(kEpsilon, &config));
  PC_RETURN_IF_ERROR(reader.ReadRope(&layout));
  PC_RETURN_IF_ERROR(ReadGemmaWindows(reader, &config));
  config.activation = Activation::kGeluTanh;
  config.post_norms = true;
  // Converters add the 1 to the norms' weights: norm_weight_offset stays 0.
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden_dim));
  // Files do not hold query_pre_attn_scalar. It is the head's dimension but in
  // the 27B model (62 layers), where it is the hidden dimension's share.
  constexpr uint32_t kLayersOf27B = 62;
  if (config.num_layers == kLayersOf27B) {
    config.attention_scale =
        1 / std::sqrt(static_cast<float>(config.hidden_dim) /
                      static_cast<float>(config.num_heads));
  }
  AddTensors(/*biased=*/false, {}, &layout);
  AddHeadNorms(&layout);
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kPostAttentionNorm,
            "blk.{}.post_attention_norm.weight");
  rules.Add(TensorRole::kPostFfnNorm, "blk.{}.post_ffw_norm.weight");
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufPhi3(const GgufFile& file,
                                         uint32_t vocab_size) {
  constexpr std::array kKeys = {kEpsilon, kWindow};
  const GgufConfig reader(file, "phi3");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "phi3", vocab_size));
  ModelConfig& config = layout.config;
  if (reader.Has(kWindow) &&
      DescribeGgufValue(*file.Find(reader.Key(kWindow))) != "0") {
    PC_ASSIGN_OR_RETURN(const uint32_t window,
                        reader.Dimension(kWindow, kMaxContext));
    // Of a whole context: none.
    if (window < config.context_length) {
      config.layer_windows.assign(config.num_layers, window);
    }
  }
  AddTensors(/*biased=*/false, {.qkv = true, .gate_up = true}, &layout);
  return layout;
}

}  // namespace promptcache::worker
