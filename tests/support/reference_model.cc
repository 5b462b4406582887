#include "tests/support/reference_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/memory/memory.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

using States = ReferenceModel::States;
using Seen = ReferenceModel::Seen;
using Token = ReferenceModel::Token;

// Nearest bf16, ties to even. REQUIRES: finite.
float RoundToBf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

void AddTo(std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

void Append(std::vector<double>& all, const std::vector<double>& x) {
  all.insert(all.end(), x.begin(), x.end());
}

}  // namespace

absl::StatusOr<ReferenceModel::Matrix> ReferenceModel::Load(
    const ModelFile& file, TensorRole role, uint32_t layer, Weights weights) {
  PC_ASSIGN_OR_RETURN(const TensorView view, file.Tensor(role, layer));
  Matrix matrix{view.rows, view.cols, {}};
  std::vector<float> row(view.cols);
  const bool round = weights == Weights::kBf16 && view.rows > 1;
  for (uint64_t r = 0; r < view.rows; ++r) {
    DequantizeRow(view, r, row);
    for (const float x : row) {
      matrix.values.push_back(round ? RoundToBf16(x) : x);
    }
  }
  return matrix;
}

absl::StatusOr<std::unique_ptr<ReferenceModel>> ReferenceModel::Create(
    const ModelFile& file, Weights weights) {
  auto model = absl::WrapUnique(new ReferenceModel(file.config()));
  const auto load = [&](TensorRole role, uint32_t layer, Matrix& matrix) {
    absl::StatusOr<Matrix> loaded = Load(file, role, layer, weights);
    if (loaded.ok()) matrix = *std::move(loaded);
    return loaded.status();
  };
  PC_RETURN_IF_ERROR(load(TensorRole::kTokenEmbedding, 0, model->embedding_));
  PC_RETURN_IF_ERROR(load(TensorRole::kOutputNorm, 0, model->output_norm_));
  if (!file.config().tied_embeddings) {
    PC_RETURN_IF_ERROR(load(TensorRole::kOutput, 0, model->output_));
  }
  model->layers_.resize(file.config().num_layers);
  for (uint32_t i = 0; i < model->layers_.size(); ++i) {
    Layer& layer = model->layers_[i];
    const std::pair<TensorRole, Matrix*> tensors[] = {
        {TensorRole::kAttentionNorm, &layer.attention_norm},
        {TensorRole::kQuery, &layer.query},
        {TensorRole::kKey, &layer.key},
        {TensorRole::kValue, &layer.value},
        {TensorRole::kAttentionOut, &layer.out},
        {TensorRole::kFfnNorm, &layer.ffn_norm},
        {TensorRole::kFfnGate, &layer.gate},
        {TensorRole::kFfnUp, &layer.up},
        {TensorRole::kFfnDown, &layer.down},
    };
    for (const auto& [role, matrix] : tensors) {
      PC_RETURN_IF_ERROR(load(role, i, *matrix));
    }
  }
  return model;
}

std::vector<double> ReferenceModel::Multiply(const Matrix& matrix,
                                             std::span<const double> x) {
  std::vector<double> y(matrix.rows, 0.0);
  for (size_t r = 0; r < matrix.rows; ++r) {
    for (size_t c = 0; c < matrix.cols; ++c) {
      y[r] += static_cast<double>(matrix.values[r * matrix.cols + c]) * x[c];
    }
  }
  return y;
}

std::vector<double> ReferenceModel::Norm(const Matrix& weight,
                                         std::span<const double> x) const {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) +
                                     static_cast<double>(config_.norm_epsilon));
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] * scale * static_cast<double>(weight.values[i]);
  }
  return y;
}

void ReferenceModel::Rotate(std::span<double> head, int32_t position) const {
  const RopeConfig& rope = config_.rope;
  const uint32_t pairs = rope.dims / 2;
  for (uint32_t i = 0; i < pairs; ++i) {
    const double angle =
        position * std::pow(static_cast<double>(rope.theta),
                            -2.0 * i / static_cast<double>(rope.dims));
    const bool half = rope.pairing == RopePairing::kHalfSplit;
    double& a = head[half ? i : 2 * i];
    double& b = head[half ? i + pairs : 2 * i + 1];
    const double rotated = a * std::cos(angle) - b * std::sin(angle);
    b = a * std::sin(angle) + b * std::cos(angle);
    a = rotated;
  }
}

std::vector<double> ReferenceModel::Attend(uint32_t layer,
                                           std::vector<double> query,
                                           int32_t position,
                                           std::span<const Seen> seen) const {
  const size_t dim = config_.head_dim;
  const size_t kv_dim = config_.num_kv_heads * dim;
  const size_t group = config_.num_heads / config_.num_kv_heads;
  std::vector<double> out(query.size(), 0.0);
  for (size_t h = 0; h < config_.num_heads; ++h) {
    const std::span<double> q(query.data() + h * dim, dim);
    Rotate(q, position);
    std::vector<double> scores;
    std::vector<const double*> values;
    for (const Seen& s : seen) {
      for (size_t t = s.first_token; t < s.first_token + s.num_tokens; ++t) {
        const size_t at = t * kv_dim + h / group * dim;
        const double* key = s.states->keys[layer].data() + at;
        std::vector<double> k(key, key + dim);
        Rotate(k, s.states->positions[t] + s.shift);
        double dot = 0;
        for (size_t i = 0; i < dim; ++i) dot += q[i] * k[i];
        scores.push_back(dot / std::sqrt(static_cast<double>(dim)));
        values.push_back(s.states->values[layer].data() + at);
      }
    }
    const double best = *std::ranges::max_element(scores);
    double total = 0;
    for (double& score : scores) total += score = std::exp(score - best);
    for (size_t t = 0; t < scores.size(); ++t) {
      for (size_t i = 0; i < dim; ++i) {
        out[h * dim + i] += scores[t] / total * values[t][i];
      }
    }
  }
  return out;
}

void ReferenceModel::Feed(const Layer& layer, std::vector<double>& x) const {
  const std::vector<double> normed = Norm(layer.ffn_norm, x);
  std::vector<double> gate = Multiply(layer.gate, normed);
  const std::vector<double> up = Multiply(layer.up, normed);
  for (size_t i = 0; i < gate.size(); ++i) {
    gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  }
  AddTo(x, Multiply(layer.down, gate));
}

ReferenceModel::Result ReferenceModel::Run(std::span<const Token> tokens,
                                           std::span<const Seen> seen) const {
  Result result;
  States& own = result.states;
  own.keys.resize(config_.num_layers);
  own.values.resize(config_.num_layers);
  std::vector<std::vector<double>> x;
  for (const Token& token : tokens) {
    own.positions.push_back(token.position);
    const auto row = embedding_.values.begin() +
                     static_cast<std::ptrdiff_t>(embedding_.cols) * token.id;
    x.emplace_back(row, row + static_cast<std::ptrdiff_t>(embedding_.cols));
  }
  std::vector<Seen> visible(seen.begin(), seen.end());
  visible.push_back({&own, 0, 0, 0});
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    const Layer& layer = layers_[i];
    for (size_t t = 0; t < tokens.size(); ++t) {
      const std::vector<double> normed = Norm(layer.attention_norm, x[t]);
      Append(own.keys[i], Multiply(layer.key, normed));
      Append(own.values[i], Multiply(layer.value, normed));
      visible.back().num_tokens = t + 1;
      AddTo(x[t], Multiply(layer.out, Attend(i, Multiply(layer.query, normed),
                                             tokens[t].position, visible)));
      Feed(layer, x[t]);
    }
  }
  const Matrix& head = output_.values.empty() ? embedding_ : output_;
  for (const std::vector<double>& row : x) {
    result.logits.push_back(Multiply(head, Norm(output_norm_, row)));
  }
  return result;
}

std::vector<Token> TokensAt(std::span<const int32_t> ids, int32_t start) {
  std::vector<Token> tokens;
  for (const int32_t id : ids) tokens.push_back({id, start++});
  return tokens;
}

}  // namespace promptcache::worker
