// Models with layer norms and a plain feed-forward: Falcon, MPT, GPT-NeoX,
// GPT-2. Converters leave q, k and v fused, all of each one below the other.
#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/gguf_family.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kEpsilon = "attention.layer_norm_epsilon";

absl::StatusOr<ModelLayout> ReadCommon(const GgufConfig& reader,
                                       std::string_view architecture,
                                       uint32_t vocab_size) {
  ModelLayout layout;
  ModelConfig& config = layout.config;
  config.architecture = architecture;
  config.vocab_size = vocab_size;
  config.norm = NormKind::kLayer;
  config.gated_ffn = false;
  config.activation = Activation::kGelu;
  PC_RETURN_IF_ERROR(reader.ReadDimensions(kEpsilon, &config));
  return layout;
}

struct Biases {
  bool norms = false;
  bool matrices = false;
};

void AddTensors(Biases biases, ModelLayout* layout) {
  RuleWriter rules(layout);
  rules.Add(TensorRole::kTokenEmbedding, "token_embd.weight");
  rules.AddLinear(TensorRole::kOutputNorm, "output_norm", biases.norms);
  rules.Add(TensorRole::kOutput, "output.weight").optional = true;
  rules.AddLinear(TensorRole::kAttentionNorm, "blk.{}.attn_norm", biases.norms);
  rules.AddStackedQkv("blk.{}.attn_qkv", biases.matrices);
  rules.AddLinear(TensorRole::kAttentionOut, "blk.{}.attn_output",
                  biases.matrices);
  rules.AddLinear(TensorRole::kFfnUp, "blk.{}.ffn_up", biases.matrices);
  rules.AddLinear(TensorRole::kFfnDown, "blk.{}.ffn_down", biases.matrices);
}

}  // namespace

absl::StatusOr<ModelLayout> ReadGgufFalcon(const GgufFile& file,
                                           uint32_t vocab_size) {
  constexpr std::array<std::string_view, 2> kKeys = {kEpsilon,
                                                     "tensor_data_layout"};
  const GgufConfig reader(file, "falcon");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "falcon", vocab_size));
  ModelConfig& config = layout.config;
  PC_RETURN_IF_ERROR(reader.ReadRope(&layout));
  config.residual = ResidualKind::kParallel;
  // 40B has two norms: the one of attention is then called attn_norm_2.
  const bool has_two = std::any_of(
      file.tensors().begin(), file.tensors().end(),
      [](const GgufTensor& t) { return t.name == "blk.0.attn_norm_2.weight"; });
  config.shared_parallel_norm = !has_two;
  AddTensors({.norms = true}, &layout);
  if (has_two) {
    for (TensorRule& rule : layout.tensors) {
      if (rule.role == TensorRole::kAttentionNorm) {
        rule.role = TensorRole::kFfnNorm;
      } else if (rule.role == TensorRole::kAttentionNormBias) {
        rule.role = TensorRole::kFfnNormBias;
      }
    }
    RuleWriter(&layout).AddLinear(TensorRole::kAttentionNorm,
                                  "blk.{}.attn_norm_2", true);
  }
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufMpt(const GgufFile& file,
                                        uint32_t vocab_size) {
  constexpr std::string_view kAlibi = "attention.max_alibi_bias";
  constexpr std::array kKeys = {kEpsilon, kAlibi};
  const GgufConfig reader(file, "mpt");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "mpt", vocab_size));
  layout.config.positions = PositionKind::kAlibi;
  PC_ASSIGN_OR_RETURN(layout.config.alibi_max_bias,
                      reader.PositiveFloat(kAlibi));
  AddTensors({}, &layout);
  RuleWriter(&layout).Add(TensorRole::kFfnNorm, "blk.{}.ffn_norm.weight");
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufGptNeox(const GgufFile& file,
                                            uint32_t vocab_size) {
  constexpr std::array<std::string_view, 2> kKeys = {kEpsilon,
                                                     "use_parallel_residual"};
  const GgufConfig reader(file, "gptneox");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "gptneox", vocab_size));
  PC_RETURN_IF_ERROR(reader.ReadRope(&layout));
  PC_ASSIGN_OR_RETURN(const bool parallel, file.Bool(reader.Key(kKeys[1])));
  if (parallel) layout.config.residual = ResidualKind::kParallel;
  AddTensors({.norms = true, .matrices = true}, &layout);
  RuleWriter(&layout).AddLinear(TensorRole::kFfnNorm, "blk.{}.ffn_norm", true);
  return layout;
}

absl::StatusOr<ModelLayout> ReadGgufGpt2(const GgufFile& file,
                                         uint32_t vocab_size) {
  constexpr std::array kKeys = {kEpsilon};
  const GgufConfig reader(file, "gpt2");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  PC_ASSIGN_OR_RETURN(ModelLayout layout,
                      ReadCommon(reader, "gpt2", vocab_size));
  layout.config.positions = PositionKind::kLearned;
  layout.config.activation = Activation::kGeluTanh;
  AddTensors({.norms = true, .matrices = true}, &layout);
  RuleWriter rules(&layout);
  rules.Add(TensorRole::kPositionEmbedding, "position_embd.weight");
  rules.AddLinear(TensorRole::kFfnNorm, "blk.{}.ffn_norm", true);
  return layout;
}

}  // namespace promptcache::worker
