#include <array>

#include "common/status_macros.h"
#include "inference_worker/model/gguf_family.h"

namespace promptcache::worker {

absl::StatusOr<ModelLayout> ReadGgufLlama(const GgufFile& file,
                                          uint32_t vocab_size) {
  constexpr std::array<std::string_view, 1> kKeys = {
      "attention.layer_norm_rms_epsilon"};
  const GgufConfig reader(file, "llama");
  PC_RETURN_IF_ERROR(reader.RefuseUnknown(kKeys));
  ModelLayout layout;
  ModelConfig& config = layout.config;
  config.architecture = "llama";
  config.vocab_size = vocab_size;
  PC_RETURN_IF_ERROR(reader.ReadDimensions(kKeys[0], &config));
  // Converters permute the rows of wq and wk for this architecture.
  config.rope.pairing = RopePairing::kInterleaved;
  PC_RETURN_IF_ERROR(reader.ReadRope(&config));

  RuleWriter rules(&layout);
  rules.Add(TensorRole::kTokenEmbedding, "token_embd.weight");
  rules.Add(TensorRole::kOutputNorm, "output_norm.weight");
  rules.Add(TensorRole::kOutput, "output.weight").optional = true;
  rules.Add(TensorRole::kAttentionNorm, "blk.{}.attn_norm.weight");
  rules.Add(TensorRole::kQuery, "blk.{}.attn_q.weight");
  rules.Add(TensorRole::kKey, "blk.{}.attn_k.weight");
  rules.Add(TensorRole::kValue, "blk.{}.attn_v.weight");
  rules.Add(TensorRole::kAttentionOut, "blk.{}.attn_output.weight");
  rules.Add(TensorRole::kFfnNorm, "blk.{}.ffn_norm.weight");
  rules.Add(TensorRole::kFfnGate, "blk.{}.ffn_gate.weight");
  rules.Add(TensorRole::kFfnUp, "blk.{}.ffn_up.weight");
  rules.Add(TensorRole::kFfnDown, "blk.{}.ffn_down.weight");
  return layout;
}

}  // namespace promptcache::worker
