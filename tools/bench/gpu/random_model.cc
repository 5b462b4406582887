#include "tools/bench/gpu/random_model.h"

#include <algorithm>
#include <random>

#include "common/float_types.h"

namespace promptcache::bench {

using worker::TensorRole;

RandomModel::Shape RandomModel::Llama2Of7B() {
  return {.name = "Llama-2-7B",
          .num_layers = 32,
          .hidden_dim = 4096,
          .num_heads = 32,
          .num_kv_heads = 32,
          .head_dim = 128,
          .ffn_dim = 11008,
          .vocab_size = 32000,
          .context_length = 8192};
}

RandomModel::Shape RandomModel::Llama3Of8B() {
  return {.name = "Llama-3-8B",
          .num_layers = 32,
          .hidden_dim = 4096,
          .num_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .ffn_dim = 14336,
          .vocab_size = 128256,
          .context_length = 8192};
}

RandomModel::Shape RandomModel::Small() {
  return {.name = "small",
          .num_layers = 2,
          .hidden_dim = 64,
          .num_heads = 2,
          .num_kv_heads = 1,
          .head_dim = 64,
          .ffn_dim = 96,
          .vocab_size = 100,
          .context_length = 1024};
}

RandomModel::RandomModel(const Shape& shape) {
  config_.architecture = "llama";
  config_.name = shape.name;
  config_.num_layers = shape.num_layers;
  config_.hidden_dim = shape.hidden_dim;
  config_.num_heads = shape.num_heads;
  config_.num_kv_heads = shape.num_kv_heads;
  config_.head_dim = shape.head_dim;
  config_.ffn_dim = shape.ffn_dim;
  config_.vocab_size = shape.vocab_size;
  config_.context_length = shape.context_length;
  config_.rope.dims = shape.head_dim;
  // A block of random numbers again and again, as long as the largest matrix.
  const size_t widest = std::max(
      {shape.ffn_dim, shape.vocab_size, shape.num_heads * shape.head_dim});
  const size_t count = widest * std::max(shape.hidden_dim, shape.head_dim);
  const size_t block = std::min(count, size_t{1} << 22);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  bits_.resize(count);
  for (size_t i = 0; i < block; ++i) bits_[i] = FloatToBf16(normal(random));
  for (size_t i = block; i < count; ++i) bits_[i] = bits_[i - block];
}

absl::StatusOr<worker::TensorView> RandomModel::Tensor(TensorRole role,
                                                       uint32_t) const {
  const uint64_t hidden = config_.hidden_dim;
  const uint64_t query = uint64_t{config_.num_heads} * config_.head_dim;
  const uint64_t kv = uint64_t{config_.num_kv_heads} * config_.head_dim;
  uint64_t rows = 1;
  uint64_t cols = hidden;
  switch (role) {
    case TensorRole::kTokenEmbedding:
    case TensorRole::kOutput:
      rows = config_.vocab_size;
      break;
    case TensorRole::kOutputNorm:
    case TensorRole::kAttentionNorm:
    case TensorRole::kFfnNorm:
      break;
    case TensorRole::kQuery:
      rows = query;
      break;
    case TensorRole::kKey:
    case TensorRole::kValue:
      rows = kv;
      break;
    case TensorRole::kAttentionOut:
      rows = hidden;
      cols = query;
      break;
    case TensorRole::kFfnGate:
    case TensorRole::kFfnUp:
      rows = config_.ffn_dim;
      break;
    case TensorRole::kFfnDown:
      rows = hidden;
      cols = config_.ffn_dim;
      break;
    default:
      return absl::NotFoundError("a random model has no such tensor");
  }
  return worker::TensorView{
      .name = "random",
      .type = worker::TensorType::kBf16,
      .rows = rows,
      .cols = cols,
      .data = std::as_bytes(std::span(bits_)).first(rows * cols * 2)};
}

absl::StatusOr<Digest> RandomModel::Fingerprint() const {
  return absl::UnimplementedError("a random model is cached nowhere");
}

uint64_t RandomModel::WeightBytes() const {
  const uint64_t hidden = config_.hidden_dim;
  const uint64_t query = uint64_t{config_.num_heads} * config_.head_dim;
  const uint64_t kv = uint64_t{config_.num_kv_heads} * config_.head_dim;
  const uint64_t layer =
      hidden * (2 * query + 2 * kv + uint64_t{3} * config_.ffn_dim);
  return 2 *
         (config_.num_layers * layer + uint64_t{config_.vocab_size} * hidden);
}

}  // namespace promptcache::bench
