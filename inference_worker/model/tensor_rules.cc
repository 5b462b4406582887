#include "glog/logging.h"
#include "inference_worker/model/tensor_table.h"

namespace promptcache::worker {

TensorShape ShapeOf(const ModelConfig& c, TensorRole role) {
  const uint64_t hidden = c.hidden_dim;
  const uint64_t query = uint64_t{c.num_heads} * c.head_dim;
  const uint64_t kv = uint64_t{c.num_kv_heads} * c.head_dim;
  switch (role) {
    case TensorRole::kTokenEmbedding:
    case TensorRole::kOutput:
      return {c.vocab_size, hidden};
    case TensorRole::kPositionEmbedding:
      return {uint64_t{c.context_length} + c.position_table_offset, hidden};
    case TensorRole::kQuery:
    case TensorRole::kCrossQuery:
    case TensorRole::kEncoderQuery:
      return {query, hidden};
    case TensorRole::kKey:
    case TensorRole::kValue:
    case TensorRole::kCrossKey:
    case TensorRole::kCrossValue:
    case TensorRole::kEncoderKey:
    case TensorRole::kEncoderValue:
      return {kv, hidden};
    case TensorRole::kAttentionOut:
    case TensorRole::kCrossOut:
    case TensorRole::kEncoderAttentionOut:
      return {hidden, query};
    case TensorRole::kFfnGate:
    case TensorRole::kFfnUp:
    case TensorRole::kEncoderFfnGate:
    case TensorRole::kEncoderFfnUp:
      return {c.ffn_dim, hidden};
    case TensorRole::kFfnDown:
    case TensorRole::kEncoderFfnDown:
      return {hidden, c.ffn_dim};
    case TensorRole::kRelativeBias:
    case TensorRole::kEncoderRelativeBias:
      return {c.relative_buckets, c.num_heads};
    case TensorRole::kQueryNorm:
    case TensorRole::kKeyNorm:
      return {1, c.head_dim};
    case TensorRole::kOutputBias:
      return {1, c.vocab_size};
    case TensorRole::kQueryBias:
      return {1, query};
    case TensorRole::kKeyBias:
    case TensorRole::kValueBias:
      return {1, kv};
    case TensorRole::kFfnUpBias:
      return {1, c.ffn_dim};
    case TensorRole::kOutputNorm:
    case TensorRole::kAttentionNorm:
    case TensorRole::kFfnNorm:
    case TensorRole::kPostAttentionNorm:
    case TensorRole::kPostFfnNorm:
    case TensorRole::kOutputNormBias:
    case TensorRole::kAttentionNormBias:
    case TensorRole::kAttentionOutBias:
    case TensorRole::kFfnNormBias:
    case TensorRole::kFfnDownBias:
    case TensorRole::kCrossNorm:
    case TensorRole::kEncoderOutputNorm:
    case TensorRole::kEncoderAttentionNorm:
    case TensorRole::kEncoderFfnNorm:
      return {1, hidden};
  }
  LOG(FATAL) << "role " << static_cast<int>(role);
}

bool IsEncoderRole(TensorRole role) {
  return role >= TensorRole::kEncoderOutputNorm;
}

TensorRole BiasOf(TensorRole role) {
  switch (role) {
    case TensorRole::kOutputNorm:
      return TensorRole::kOutputNormBias;
    case TensorRole::kOutput:
      return TensorRole::kOutputBias;
    case TensorRole::kAttentionNorm:
      return TensorRole::kAttentionNormBias;
    case TensorRole::kQuery:
      return TensorRole::kQueryBias;
    case TensorRole::kKey:
      return TensorRole::kKeyBias;
    case TensorRole::kValue:
      return TensorRole::kValueBias;
    case TensorRole::kAttentionOut:
      return TensorRole::kAttentionOutBias;
    case TensorRole::kFfnNorm:
      return TensorRole::kFfnNormBias;
    case TensorRole::kFfnUp:
      return TensorRole::kFfnUpBias;
    case TensorRole::kFfnDown:
      return TensorRole::kFfnDownBias;
    default:
      LOG(FATAL) << "role " << static_cast<int>(role) << " has no bias";
  }
}

TensorRule& RuleWriter::Add(TensorRole role, std::string_view name) {
  layout_.tensors.push_back({.role = role,
                             .name = std::string(name),
                             .shape = ShapeOf(layout_.config, role)});
  return layout_.tensors.back();
}

void RuleWriter::AddLinear(TensorRole role, std::string_view name,
                           bool biased) {
  Add(role, std::string(name) + ".weight");
  if (biased) Add(BiasOf(role), std::string(name) + ".bias");
}

void RuleWriter::AddFused(const std::vector<Part>& parts, std::string_view name,
                          bool biased, bool transposed) {
  uint64_t rows = 0;
  for (const Part& part : parts) {
    rows += ShapeOf(layout_.config, part.role).rows;
  }
  for (const Part& part : parts) {
    const TensorPart cut = {.first = part.first,
                            .count = ShapeOf(layout_.config, part.role).rows,
                            .run = part.run,
                            .run_stride = part.run_stride};
    TensorRule& weight = Add(part.role, std::string(name) + ".weight");
    weight.shape.rows = rows;
    weight.part = cut;
    weight.transposed = transposed;
    if (!biased) continue;
    TensorRule& bias = Add(BiasOf(part.role), std::string(name) + ".bias");
    bias.shape = {1, rows};
    bias.part = cut;
  }
}

void RuleWriter::AddStackedQkv(std::string_view name, bool biased,
                               bool transposed) {
  const uint64_t query = ShapeOf(layout_.config, TensorRole::kQuery).rows;
  const uint64_t kv = ShapeOf(layout_.config, TensorRole::kKey).rows;
  AddFused({{TensorRole::kQuery, 0},
            {TensorRole::kKey, query},
            {TensorRole::kValue, query + kv}},
           name, biased, transposed);
}

}  // namespace promptcache::worker
