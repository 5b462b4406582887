#pragma once

// Included by the few files that load weights.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/model_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Rows of a matrix, and the role of its bias where one may be.
struct WeightPart {
  TensorRole role;
  uint64_t num_rows;
  std::optional<TensorRole> bias;
};

// The tensors of a layer of one stack. Biases are of a decoder that stands
// alone: no family with an encoder has any.
struct LayerRoles {
  TensorRole attention_norm = TensorRole::kAttentionNorm;
  TensorRole query = TensorRole::kQuery;
  TensorRole key = TensorRole::kKey;
  TensorRole value = TensorRole::kValue;
  TensorRole attention_out = TensorRole::kAttentionOut;
  TensorRole ffn_norm = TensorRole::kFfnNorm;
  TensorRole ffn_gate = TensorRole::kFfnGate;
  TensorRole ffn_up = TensorRole::kFfnUp;
  TensorRole ffn_down = TensorRole::kFfnDown;
};
inline constexpr LayerRoles kEncoderRoles = {
    .attention_norm = TensorRole::kEncoderAttentionNorm,
    .query = TensorRole::kEncoderQuery,
    .key = TensorRole::kEncoderKey,
    .value = TensorRole::kEncoderValue,
    .attention_out = TensorRole::kEncoderAttentionOut,
    .ffn_norm = TensorRole::kEncoderFfnNorm,
    .ffn_gate = TensorRole::kEncoderFfnGate,
    .ffn_up = TensorRole::kEncoderFfnUp,
    .ffn_down = TensorRole::kEncoderFfnDown,
};

// Walks a file's tensors and has every matrix made by `make`, from the parts
// that it is to hold, one below the other.
template <typename Matrix>
class WeightLoader {
 public:
  using MakeMatrix =
      std::function<absl::StatusOr<Matrix>(std::span<const TensorView> parts)>;

  // `progress` (may be empty) is called with 0..1. All must outlive Load.
  WeightLoader(const ModelFile& file, const MakeMatrix& make,
               const std::function<void(double)>& progress)
      : file_(file),
        config_(file.config()),
        make_(make),
        progress_(progress),
        query_dim_(uint64_t{config_.num_heads} * config_.head_dim),
        kv_dim_(uint64_t{config_.num_kv_heads} * config_.head_dim) {}

  // InvalidArgument names a tensor whose shape is not what the config says.
  absl::StatusOr<ModelWeights<Matrix>> Load() {
    CountElements();
    Report();
    ModelWeights<Matrix> weights;
    const uint64_t hidden = config_.hidden_dim;
    const uint64_t vocab = config_.vocab_size;
    PC_ASSIGN_OR_RETURN(
        weights.embedding,
        Make(0, hidden, {{TensorRole::kTokenEmbedding, vocab, {}}}));
    if (config_.positions == PositionKind::kLearned) {
      PC_ASSIGN_OR_RETURN(
          weights.positions,
          Make(0, hidden,
               {{TensorRole::kPositionEmbedding, NumPositionRows(), {}}}));
    }
    if (!config_.tied_embeddings) {
      PC_ASSIGN_OR_RETURN(weights.output,
                          Make(0, hidden, {{TensorRole::kOutput, vocab, {}}}));
    }
    PC_ASSIGN_OR_RETURN(weights.output_bias,
                        OptionalVector(TensorRole::kOutputBias, 0, vocab));
    PC_ASSIGN_OR_RETURN(
        weights.output_norm,
        Norm(TensorRole::kOutputNorm, TensorRole::kOutputNormBias, 0));
    for (uint32_t i = 0; i < config_.num_layers; ++i) {
      PC_ASSIGN_OR_RETURN(LayerWeights<Matrix> layer, Layer(i, LayerRoles{}));
      weights.layers.push_back(std::move(layer));
    }
    if (config_.is_encoder_decoder()) {
      PC_RETURN_IF_ERROR(LoadEncoder(weights.encoder));
      for (float& w : weights.output_norm.weight) w *= config_.output_scale;
    }
    return weights;
  }

 private:
  absl::StatusOr<LayerWeights<Matrix>> Layer(uint32_t i,
                                             const LayerRoles& roles) {
    LayerWeights<Matrix> layer;
    PC_RETURN_IF_ERROR(LoadNorms(i, roles, layer));
    PC_RETURN_IF_ERROR(LoadAttention(i, roles, layer));
    PC_RETURN_IF_ERROR(LoadFeedForward(i, roles, layer));
    return layer;
  }

  absl::Status LoadEncoder(EncoderWeights<Matrix>& encoder) {
    for (uint32_t i = 0; i < config_.encoder_layers; ++i) {
      PC_ASSIGN_OR_RETURN(LayerWeights<Matrix> layer, Layer(i, kEncoderRoles));
      encoder.layers.push_back(std::move(layer));
    }
    PC_ASSIGN_OR_RETURN(encoder.output_norm,
                        Norm(TensorRole::kEncoderOutputNorm, {}, 0));
    for (uint32_t i = 0; i < config_.num_layers; ++i) {
      PC_ASSIGN_OR_RETURN(CrossWeights<Matrix> cross, Cross(i));
      encoder.cross.push_back(std::move(cross));
    }
    PC_ASSIGN_OR_RETURN(encoder.relative_bias,
                        RelativeBias(TensorRole::kEncoderRelativeBias));
    PC_ASSIGN_OR_RETURN(encoder.decoder_relative_bias,
                        RelativeBias(TensorRole::kRelativeBias));
    return absl::OkStatus();
  }

  absl::StatusOr<CrossWeights<Matrix>> Cross(uint32_t i) {
    const uint64_t hidden = config_.hidden_dim;
    CrossWeights<Matrix> cross;
    PC_ASSIGN_OR_RETURN(cross.norm, Norm(TensorRole::kCrossNorm, {}, i));
    PC_ASSIGN_OR_RETURN(
        cross.query,
        Project(i, hidden, {{TensorRole::kCrossQuery, query_dim_, {}}}));
    PC_ASSIGN_OR_RETURN(cross.key_value,
                        Project(i, hidden,
                                {{TensorRole::kCrossKey, kv_dim_, {}},
                                 {TensorRole::kCrossValue, kv_dim_, {}}}));
    PC_ASSIGN_OR_RETURN(
        cross.out,
        Project(i, query_dim_, {{TensorRole::kCrossOut, hidden, {}}}));
    return cross;
  }

  absl::StatusOr<std::vector<float>> RelativeBias(TensorRole role) {
    PC_ASSIGN_OR_RETURN(
        const TensorView view,
        Tensor(role, 0, config_.relative_buckets, config_.num_heads));
    std::vector<float> values(view.rows * view.cols);
    for (uint64_t row = 0; row < view.rows; ++row) {
      DequantizeRow(view, row,
                    std::span(values).subspan(row * view.cols, view.cols));
    }
    return values;
  }

  absl::Status LoadNorms(uint32_t i, const LayerRoles& roles,
                         LayerWeights<Matrix>& layer) {
    PC_ASSIGN_OR_RETURN(
        layer.attention_norm,
        Norm(roles.attention_norm, TensorRole::kAttentionNormBias, i));
    if (config_.residual == ResidualKind::kParallel &&
        config_.shared_parallel_norm) {
      layer.ffn_norm = layer.attention_norm;
    } else {
      PC_ASSIGN_OR_RETURN(layer.ffn_norm,
                          Norm(roles.ffn_norm, TensorRole::kFfnNormBias, i));
    }
    if (config_.post_norms) {
      PC_ASSIGN_OR_RETURN(layer.post_attention_norm,
                          Norm(TensorRole::kPostAttentionNorm, {}, i));
      PC_ASSIGN_OR_RETURN(layer.post_ffn_norm,
                          Norm(TensorRole::kPostFfnNorm, {}, i));
    }
    if (config_.qk_norm) {
      PC_ASSIGN_OR_RETURN(layer.query_norm, NormWeight(TensorRole::kQueryNorm,
                                                       i, config_.head_dim));
      PC_ASSIGN_OR_RETURN(layer.key_norm, NormWeight(TensorRole::kKeyNorm, i,
                                                     config_.head_dim));
    }
    return absl::OkStatus();
  }

  absl::Status LoadAttention(uint32_t i, const LayerRoles& roles,
                             LayerWeights<Matrix>& layer) {
    const uint64_t hidden = config_.hidden_dim;
    PC_ASSIGN_OR_RETURN(
        layer.qkv, Project(i, hidden,
                           {{roles.query, query_dim_, TensorRole::kQueryBias},
                            {roles.key, kv_dim_, TensorRole::kKeyBias},
                            {roles.value, kv_dim_, TensorRole::kValueBias}}));
    PC_ASSIGN_OR_RETURN(layer.attention_out,
                        Project(i, query_dim_,
                                {{roles.attention_out, hidden,
                                  TensorRole::kAttentionOutBias}}));
    return absl::OkStatus();
  }

  absl::Status LoadFeedForward(uint32_t i, const LayerRoles& roles,
                               LayerWeights<Matrix>& layer) {
    const uint64_t hidden = config_.hidden_dim;
    const uint64_t ffn = config_.ffn_dim;
    const WeightPart up = {roles.ffn_up, ffn, TensorRole::kFfnUpBias};
    if (config_.gated_ffn) {
      PC_ASSIGN_OR_RETURN(layer.gate_up,
                          Project(i, hidden, {{roles.ffn_gate, ffn, {}}, up}));
    } else {
      PC_ASSIGN_OR_RETURN(layer.gate_up, Project(i, hidden, {up}));
    }
    PC_ASSIGN_OR_RETURN(
        layer.down,
        Project(i, ffn, {{roles.ffn_down, hidden, TensorRole::kFfnDownBias}}));
    return absl::OkStatus();
  }

  absl::StatusOr<TensorView> Tensor(TensorRole role, uint32_t layer,
                                    uint64_t rows, uint64_t cols) const {
    PC_ASSIGN_OR_RETURN(TensorView view, file_.Tensor(role, layer));
    if (view.rows != rows || view.cols != cols) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", view.name, " is [", view.rows, ", ",
                       view.cols, "], must be [", rows, ", ", cols, "]"));
    }
    return view;
  }

  absl::StatusOr<std::vector<float>> Vector(TensorRole role, uint32_t layer,
                                            uint64_t count) {
    PC_ASSIGN_OR_RETURN(const TensorView view, Tensor(role, layer, 1, count));
    std::vector<float> values(view.cols);
    DequantizeRow(view, 0, values);
    return values;
  }

  // Empty when the file has none.
  absl::StatusOr<std::vector<float>> OptionalVector(TensorRole role,
                                                    uint32_t layer,
                                                    uint64_t count) {
    absl::StatusOr<std::vector<float>> values = Vector(role, layer, count);
    if (absl::IsNotFound(values.status())) return std::vector<float>();
    return values;
  }

  absl::StatusOr<std::vector<float>> NormWeight(TensorRole role, uint32_t layer,
                                                uint64_t count) {
    PC_ASSIGN_OR_RETURN(std::vector<float> weight, Vector(role, layer, count));
    for (float& w : weight) w += config_.norm_weight_offset;
    return weight;
  }

  absl::StatusOr<NormWeights> Norm(TensorRole role,
                                   std::optional<TensorRole> bias,
                                   uint32_t layer) {
    NormWeights norm;
    PC_ASSIGN_OR_RETURN(norm.weight,
                        NormWeight(role, layer, config_.hidden_dim));
    if (bias.has_value() && config_.norm == NormKind::kLayer) {
      PC_ASSIGN_OR_RETURN(norm.bias,
                          OptionalVector(*bias, layer, config_.hidden_dim));
    }
    return norm;
  }

  absl::StatusOr<Projection<Matrix>> Project(
      uint32_t layer, uint64_t cols, std::initializer_list<WeightPart> parts) {
    Projection<Matrix> projection;
    PC_ASSIGN_OR_RETURN(projection.weights, Make(layer, cols, parts));
    std::vector<float> bias;
    bool any = false;
    for (const WeightPart& part : parts) {
      std::vector<float> values;
      if (part.bias.has_value()) {
        PC_ASSIGN_OR_RETURN(values,
                            OptionalVector(*part.bias, layer, part.num_rows));
      }
      any = any || !values.empty();
      values.resize(part.num_rows);
      bias.insert(bias.end(), values.begin(), values.end());
    }
    if (any) projection.bias = std::move(bias);
    return projection;
  }

  // The parts one below the other.
  absl::StatusOr<Matrix> Make(uint32_t layer, uint64_t cols,
                              std::initializer_list<WeightPart> parts) {
    std::vector<TensorView> views;
    for (const WeightPart& part : parts) {
      PC_ASSIGN_OR_RETURN(TensorView view,
                          Tensor(part.role, layer, part.num_rows, cols));
      views.push_back(std::move(view));
    }
    PC_ASSIGN_OR_RETURN(Matrix matrix, make_(views));
    for (const WeightPart& part : parts) done_elements_ += part.num_rows * cols;
    Report();
    return matrix;
  }

  uint64_t NumPositionRows() const {
    return uint64_t{config_.context_length} + config_.position_table_offset;
  }

  void CountElements() {
    const uint64_t hidden = config_.hidden_dim;
    const uint64_t ffn_matrices = config_.gated_ffn ? 3 : 2;
    const uint64_t attention = hidden * (2 * query_dim_ + 2 * kv_dim_);
    const uint64_t layer = attention + hidden * ffn_matrices * config_.ffn_dim;
    const uint64_t embeddings = config_.tied_embeddings ? 1 : 2;
    all_elements_ =
        config_.num_layers * layer + embeddings * config_.vocab_size * hidden;
    if (config_.is_encoder_decoder()) {
      all_elements_ +=
          config_.encoder_layers * layer + config_.num_layers * attention;
    }
    if (config_.positions == PositionKind::kLearned) {
      all_elements_ += NumPositionRows() * hidden;
    }
  }

  void Report() const {
    if (!progress_) return;
    progress_(static_cast<double>(done_elements_) /
              static_cast<double>(all_elements_));
  }

  const ModelFile& file_;
  const ModelConfig& config_;
  const MakeMatrix& make_;
  const std::function<void(double)>& progress_;
  const uint64_t query_dim_;
  const uint64_t kv_dim_;
  uint64_t all_elements_ = 0;
  uint64_t done_elements_ = 0;
};

}  // namespace promptcache::worker
