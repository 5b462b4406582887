#include "tests/support/reference_t5.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

// As transformers computes it, in float.
int Bucket(int distance, int buckets, int max_distance, bool both_ways) {
  int bucket = 0;
  int n = -distance;
  if (both_ways) {
    buckets /= 2;
    if (n < 0) bucket += buckets;
    n = std::abs(n);
  } else {
    n = std::max(n, 0);
  }
  const int max_exact = buckets / 2;
  if (n < max_exact) return bucket + n;
  const float ratio =
      std::log(static_cast<float>(n) / static_cast<float>(max_exact)) /
      static_cast<float>(std::log(static_cast<double>(max_distance) /
                                  static_cast<double>(max_exact)));
  const int large =
      max_exact +
      static_cast<int>(ratio * static_cast<float>(buckets - max_exact));
  return bucket + std::min(large, buckets - 1);
}

double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
      return 0.5 * x * (1 + std::tanh(inner));
    }
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReferenceT5>> ReferenceT5::Create(
    const ModelFile& file) {
  std::unique_ptr<ReferenceT5> model(new ReferenceT5(file.config()));
  absl::Status status;
  const auto load = [&](TensorRole role, uint32_t layer) {
    Matrix matrix;
    const auto view = file.Tensor(role, layer);
    if (!view.ok()) {
      status.Update(view.status());
      return matrix;
    }
    matrix.rows = view->rows;
    matrix.cols = view->cols;
    matrix.values.resize(matrix.rows * matrix.cols);
    for (size_t row = 0; row < matrix.rows; ++row) {
      DequantizeRow(
          *view, row,
          std::span(matrix.values).subspan(row * matrix.cols, matrix.cols));
    }
    return matrix;
  };
  using enum TensorRole;
  const ModelConfig& c = model->config_;
  model->embedding_ = load(kTokenEmbedding, 0);
  model->output_ = c.tied_embeddings ? model->embedding_ : load(kOutput, 0);
  model->output_norm_ = load(kOutputNorm, 0);
  model->encoder_norm_ = load(kEncoderOutputNorm, 0);
  model->bias_ = load(kRelativeBias, 0);
  model->encoder_bias_ = load(kEncoderRelativeBias, 0);
  for (uint32_t i = 0; i < c.encoder_layers; ++i) {
    Layer& layer = model->encoder_.emplace_back();
    layer.self = {load(kEncoderAttentionNorm, i), load(kEncoderQuery, i),
                  load(kEncoderKey, i), load(kEncoderValue, i),
                  load(kEncoderAttentionOut, i)};
    layer.ffn.norm = load(kEncoderFfnNorm, i);
    if (c.gated_ffn) layer.ffn.gate = load(kEncoderFfnGate, i);
    layer.ffn.up = load(kEncoderFfnUp, i);
    layer.ffn.down = load(kEncoderFfnDown, i);
  }
  for (uint32_t i = 0; i < c.num_layers; ++i) {
    Layer& layer = model->decoder_.emplace_back();
    layer.self = {load(kAttentionNorm, i), load(kQuery, i), load(kKey, i),
                  load(kValue, i), load(kAttentionOut, i)};
    layer.cross = {load(kCrossNorm, i), load(kCrossQuery, i),
                   load(kCrossKey, i), load(kCrossValue, i),
                   load(kCrossOut, i)};
    layer.ffn.norm = load(kFfnNorm, i);
    if (c.gated_ffn) layer.ffn.gate = load(kFfnGate, i);
    layer.ffn.up = load(kFfnUp, i);
    layer.ffn.down = load(kFfnDown, i);
  }
  PC_RETURN_IF_ERROR(status);
  return model;
}

namespace {

template <typename Matrix>
std::vector<double> Multiply(const Matrix& matrix,
                             const std::vector<double>& x) {
  std::vector<double> out(matrix.rows);
  for (size_t row = 0; row < matrix.rows; ++row) {
    for (size_t col = 0; col < matrix.cols; ++col) {
      out[row] += matrix.at(row, col) * x[col];
    }
  }
  return out;
}

void AddTo(std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace

ReferenceT5::Rows ReferenceT5::Embed(std::span<const int32_t> ids) const {
  Rows rows;
  for (const int32_t id : ids) {
    std::vector<double>& row = rows.emplace_back();
    for (size_t i = 0; i < embedding_.cols; ++i) {
      row.push_back(embedding_.at(static_cast<size_t>(id), i));
    }
  }
  return rows;
}

std::vector<double> ReferenceT5::Norm(const Matrix& weight,
                                      const std::vector<double>& x) const {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) +
                                     double{config_.norm_epsilon});
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight.at(0, i);
  return out;
}

void ReferenceT5::Attend(const Attention& weights, const Rows* memory,
                         const Bias& bias, Rows& x) const {
  Rows normed;
  for (const auto& row : x) normed.push_back(Norm(weights.norm, row));
  Rows keys, values;
  for (const auto& row : memory ? *memory : normed) {
    keys.push_back(Multiply(weights.key, row));
    values.push_back(Multiply(weights.value, row));
  }
  const bool causal = memory == nullptr && !bias.both_ways;
  const size_t dim = config_.head_dim;
  for (size_t i = 0; i < x.size(); ++i) {
    const std::vector<double> query = Multiply(weights.query, normed[i]);
    std::vector<double> mixed(query.size());
    for (size_t head = 0; head < config_.num_heads; ++head) {
      const size_t seen = causal ? i + 1 : keys.size();
      std::vector<double> logits(seen);
      for (size_t j = 0; j < seen; ++j) {
        for (size_t d = head * dim; d < (head + 1) * dim; ++d) {
          logits[j] += query[d] * keys[j][d];
        }
        if (bias.table == nullptr) continue;
        const int bucket = Bucket(
            bias.positions[j] - bias.positions[i],
            static_cast<int>(config_.relative_buckets),
            static_cast<int>(config_.relative_max_distance), bias.both_ways);
        logits[j] += bias.table->at(static_cast<size_t>(bucket), head);
      }
      const double best = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (double& logit : logits) sum += logit = std::exp(logit - best);
      for (size_t j = 0; j < seen; ++j) {
        for (size_t d = head * dim; d < (head + 1) * dim; ++d) {
          mixed[d] += logits[j] / sum * values[j][d];
        }
      }
    }
    AddTo(x[i], Multiply(weights.out, mixed));
  }
}

void ReferenceT5::Feed(const FeedForward& weights, Rows& x) const {
  for (auto& row : x) {
    const std::vector<double> normed = Norm(weights.norm, row);
    std::vector<double> inner = Multiply(weights.up, normed);
    if (weights.gate.rows > 0) {
      const std::vector<double> gate = Multiply(weights.gate, normed);
      for (size_t i = 0; i < inner.size(); ++i) {
        inner[i] *= Activate(config_.activation, gate[i]);
      }
    } else {
      for (double& v : inner) v = Activate(config_.activation, v);
    }
    AddTo(row, Multiply(weights.down, inner));
  }
}

ReferenceT5::Rows ReferenceT5::Encode(
    std::span<const int32_t> ids, std::span<const int32_t> positions) const {
  Rows x = Embed(ids);
  const Bias bias = {&encoder_bias_, positions, true};
  for (const Layer& layer : encoder_) {
    Attend(layer.self, nullptr, bias, x);
    Feed(layer.ffn, x);
  }
  for (auto& row : x) row = Norm(encoder_norm_, row);
  return x;
}

ReferenceT5::Rows ReferenceT5::Encode(std::span<const int32_t> ids) const {
  std::vector<int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), 0);
  return Encode(ids, positions);
}

ReferenceT5::Rows ReferenceT5::Decode(const Rows& memory,
                                      std::span<const int32_t> ids) const {
  std::vector<int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), 0);
  Rows x = Embed(ids);
  const Bias bias = {&bias_, positions, false};
  for (const Layer& layer : decoder_) {
    Attend(layer.self, nullptr, bias, x);
    Attend(layer.cross, &memory, {}, x);
    Feed(layer.ffn, x);
  }
  for (auto& row : x) {
    row = Norm(output_norm_, row);
    for (double& v : row) v *= double{config_.output_scale};
    row = Multiply(output_, row);
  }
  return x;
}

}  // namespace promptcache::worker
