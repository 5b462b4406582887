// T5 1.0 and 1.1 (Flan-T5 among them) as converters write them.
#include <algorithm>
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
constexpr std::string_view kBuckets = "attention.relative_buckets_count";
constexpr std::string_view kStart = "decoder_start_token_id";
constexpr std::string_view kDecoderLayers = "decoder_block_count";
constexpr std::string_view kOutputName = "output.weight";

bool HasTensor(const GgufFile& file, std::string_view name) {
  const auto& tensors = file.tensors();
  return std::any_of(
      tensors.begin(), tensors.end(),
      [name](const GgufTensor& tensor) { return tensor.name == name; });
}

// What files do not say: no converter writes another distance, and the
// activation follows from whether there is a gate.
void UseDefaults(const GgufFile& file, ModelConfig* config) {
  config->architecture = "t5";
  config->positions = PositionKind::kRelative;
  config->relative_max_distance = 128;
  config->attention_scale = 1;
  config->context_length = kT5Context;
  config->gated_ffn = HasTensor(file, "dec.blk.0.ffn_gate.weight");
  config->activation =
      config->gated_ffn ? Activation::kGeluTanh : Activation::kRelu;
}

absl::Status ReadConfig(const GgufConfig& reader, ModelConfig* config) {
  PC_RETURN_IF_ERROR(reader.ReadDimensions(kEpsilon, config));
  UseDefaults(reader.file(), config);
  config->encoder_layers = config->num_layers;
  PC_ASSIGN_OR_RETURN(
      config->num_layers,
      reader.Dimension(kDecoderLayers, kMaxLayers, config->encoder_layers));
  PC_ASSIGN_OR_RETURN(config->relative_buckets,
                      reader.Dimension(kBuckets, kMaxDim));
  PC_ASSIGN_OR_RETURN(const uint32_t start,
                      reader.file().Uint32(reader.Key(kStart)));
  if (start >= config->vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata ", reader.Key(kStart), ": ", start,
                     " is not one of the ", config->vocab_size, " tokens"));
  }
  config->decoder_start_token = static_cast<int32_t>(start);
  if (!HasTensor(reader.file(), kOutputName)) {
    config->output_scale =
        1.0f / std::sqrt(static_cast<float>(config->hidden_dim));
  }
  return absl::OkStatus();
}

// The roles of a stack's layers in the order of their names below.
using StackRoles = std::array<TensorRole, 9>;

void AddStack(std::string_view stack, const StackRoles& roles,
              ModelLayout* layout) {
  constexpr std::array<std::string_view, 9> kNames = {
      "attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_o",
      "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};
  RuleWriter rules(layout);
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == "ffn_gate" && !layout->config.gated_ffn) continue;
    rules.Add(roles[i], std::string(stack) + ".blk.{}." +
                            std::string(kNames[i]) + ".weight");
  }
}

}  // namespace

absl::StatusOr<ModelLayout> ReadGgufT5(const GgufFile& file,
                                       uint32_t vocab_size) {
  constexpr std::array<std::string_view, 5> kKeys = {
      kEpsilon, "attention.layer_norm_epsilon", kBuckets, kStart,
      kDecoderLayers};
  const GgufConfig reader(file, "t5");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  ModelLayout layout;
  layout.config.vocab_size = vocab_size;
  PC_RETURN_IF_ERROR(ReadConfig(reader, &layout.config));
  // A table that no version reads.
  layout.ignored_endings = {".cross_attn_rel_b.weight"};
  using enum TensorRole;
  RuleWriter rules(&layout);
  rules.Add(kTokenEmbedding, "token_embd.weight");
  rules.Add(kOutput, kOutputName).optional = true;
  rules.Add(kOutputNorm, "dec.output_norm.weight");
  rules.Add(kRelativeBias, "dec.blk.0.attn_rel_b.weight");
  rules.Add(kEncoderOutputNorm, "enc.output_norm.weight");
  rules.Add(kEncoderRelativeBias, "enc.blk.0.attn_rel_b.weight");
  AddStack("dec",
           {kAttentionNorm, kQuery, kKey, kValue, kAttentionOut, kFfnNorm,
            kFfnGate, kFfnUp, kFfnDown},
           &layout);
  AddStack("enc",
           {kEncoderAttentionNorm, kEncoderQuery, kEncoderKey, kEncoderValue,
            kEncoderAttentionOut, kEncoderFfnNorm, kEncoderFfnGate,
            kEncoderFfnUp, kEncoderFfnDown},
           &layout);
  rules.Add(kCrossNorm, "dec.blk.{}.cross_attn_norm.weight");
  rules.Add(kCrossQuery, "dec.blk.{}.cross_attn_q.weight");
  rules.Add(kCrossKey, "dec.blk.{}.cross_attn_k.weight");
  rules.Add(kCrossValue, "dec.blk.{}.cross_attn_v.weight");
  rules.Add(kCrossOut, "dec.blk.{}.cross_attn_o.weight");
  return layout;
}

}  // namespace promptcache::worker
