#include "inference_worker/engine/cpu_encoder_decoder.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/cpu_activation.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/relative_bias.h"
#include "inference_worker/engine/families/reuse.h"
#include "inference_worker/engine/pass_buffers.h"
#include "inference_worker/engine/row_groups.h"

namespace promptcache::worker {
namespace {

cpu::DistanceBias BiasOf(const ModelConfig& config,
                         const std::vector<float>& table, bool both_ways) {
  const auto reach = static_cast<int32_t>(config.relative_max_distance);
  return cpu::DistanceBias::Create(
      config.num_heads, reach, [&](uint32_t head, int32_t distance) {
        const uint32_t bucket =
            RelativeBucket(distance, config.relative_buckets,
                           config.relative_max_distance, both_ways);
        return table[size_t{bucket} * config.num_heads + head];
      });
}

class CpuEncoderDecoder final : public Backend {
 public:
  CpuEncoderDecoder(const ModelConfig& config, uint32_t page_tokens,
                    std::unique_ptr<cpu::Kernels> kernels, CpuWeights weights)
      : config_(config),
        layout_{.num_layers = config.num_layers,
                .num_kv_heads = config.num_kv_heads,
                .head_dim = config.head_dim,
                .page_tokens = page_tokens},
        numerics_(absl::StrCat(weights.quantized ? "fast/" : "exact/",
                               kernels->name())),
        kernels_(std::move(kernels)),
        activation_(CpuActivationOf(config.activation)),
        weights_(std::move(weights)),
        encoder_bias_(BiasOf(config, weights_.encoder.relative_bias,
                             /*both_ways=*/true)),
        decoder_bias_(BiasOf(config, weights_.encoder.decoder_relative_bias,
                             /*both_ways=*/false)) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;
  absl::Status EncoderOutput(std::span<const int32_t> tokens,
                             std::vector<float>* output) override;

  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return config_.vocab_size; }
  uint32_t context_length() const override { return config_.context_length; }
  const std::string& numerics() const override { return numerics_; }
  uint32_t num_threads() const override { return kernels_->num_threads(); }
  std::optional<int32_t> decoder_start() const override {
    return config_.decoder_start_token;
  }

 private:
  // Where a group's rows are in the pass's rows of its stack.
  struct Rows {
    const RowGroup* group = nullptr;
    size_t first = 0;
    size_t segment = 0;  // of the encoder
    uint32_t count() const {
      return static_cast<uint32_t>(group->tokens.size());
    }
  };

  size_t hidden_dim() const { return config_.hidden_dim; }
  size_t ffn_dim() const { return config_.ffn_dim; }
  size_t query_dim() const {
    return size_t{config_.num_heads} * config_.head_dim;
  }
  size_t kv_dim() const {
    return size_t{config_.num_kv_heads} * config_.head_dim;
  }
  size_t qkv_dim() const { return query_dim() + 2 * kv_dim(); }

  PassLimits Limits() const;
  RowWidths Widths() const {
    return {.hidden = hidden_dim(),
            .query = query_dim(),
            .qkv = qkv_dim(),
            .ffn = ffn_dim(),
            .encoder_kv = kv_dim()};
  }
  void SortRows(std::span<const RowGroup> groups);
  void RunEncoder();
  void DescribeEncoder();
  void WriteCrossStates();
  void RunDecoder();
  void DescribeDecoder();
  void AttendToEncoder(uint32_t layer);

  void Embed();
  cpu::AttentionShape ShapeOf(const KvLayout& layout, uint32_t layer,
                              const cpu::DistanceBias* bias) const;
  void AttendToSelf(const CpuLayerWeights& layer,
                    const cpu::AttentionShape& shape);
  void RunFeedForward(const CpuLayerWeights& layer);
  void Project(const float* in, size_t depth, const CpuProjection& projection,
               float* out, size_t stride);
  void Normalize(const CpuNorm& norm, const float* x, size_t num_rows,
                 float* out);
  void AddAttention(const CpuProjection& out);
  void RunHead(float* logits);
  template <typename Body>
  void ForBlocks(Body body) {
    for (size_t row = 0; row < num_rows_; row += kBlockRows) {
      body(row, std::min(kBlockRows, num_rows_ - row));
    }
  }

  const ModelConfig config_;
  const KvLayout layout_;
  const std::string numerics_;
  const std::unique_ptr<cpu::Kernels> kernels_;
  const cpu::Activation activation_;
  const CpuWeights weights_;
  const cpu::DistanceBias encoder_bias_;
  const cpu::DistanceBias decoder_bias_;

  // Of the pass that is running; kept for the next one's sake.
  PassBuffers act_;
  std::vector<Rows> encoder_;
  std::vector<Rows> decoder_;
  // Of the stack that is running.
  size_t num_rows_ = 0;
  std::vector<int32_t> ids_;
  std::vector<cpu::KvWrite> writes_;
  std::vector<cpu::AttentionGroup> attention_;
  std::vector<KvView> segment_views_;  // of the encoder's groups
};

PassLimits CpuEncoderDecoder::Limits() const {
  return {.layout = layout_,
          .vocab_size = config_.vocab_size,
          .max_distance = static_cast<int32_t>(config_.context_length) - 1,
          .encoder_decoder = true};
}

absl::Status CpuEncoderDecoder::Forward(std::span<const RowGroup> groups,
                                        std::vector<float>* logits) {
  PC_RETURN_IF_ERROR(CheckRowGroups(groups, Limits()));
  SortRows(groups);
  size_t num_logit_rows = 0;
  for (const Rows& rows : decoder_) num_logit_rows += NumLogitRows(*rows.group);
  const auto rows_of = [](const std::vector<Rows>& stack) {
    return stack.empty() ? 0 : stack.back().first + stack.back().count();
  };
  PC_RETURN_IF_ERROR(
      act_.Reserve(std::max(rows_of(encoder_), rows_of(decoder_)), Widths()));
  logits->resize(num_logit_rows * config_.vocab_size);
  if (!encoder_.empty()) {
    RunEncoder();
    WriteCrossStates();
  }
  if (decoder_.empty()) return absl::OkStatus();
  RunDecoder();
  RunHead(logits->data());
  return absl::OkStatus();
}

absl::Status CpuEncoderDecoder::EncoderOutput(std::span<const int32_t> tokens,
                                              std::vector<float>* output) {
  if (tokens.empty()) return absl::InvalidArgumentError("no tokens");
  PC_RETURN_IF_ERROR(CheckTokens(tokens, config_.vocab_size));
  const RowGroup group = {.tokens = tokens, .part = RowPart::kEncoder};
  SortRows({&group, 1});
  PC_RETURN_IF_ERROR(act_.Reserve(tokens.size(), Widths()));
  RunEncoder();
  const float* last = act_.residual + (num_rows_ - 1) * hidden_dim();
  output->assign(last, last + hidden_dim());
  return absl::OkStatus();
}

void CpuEncoderDecoder::SortRows(std::span<const RowGroup> groups) {
  encoder_.clear();
  decoder_.clear();
  size_t segment = 0;
  size_t first[2] = {};  // of the decoder, of the encoder
  for (const RowGroup& group : groups) {
    const bool encoder = group.part != RowPart::kDecoder;
    if (group.part == RowPart::kEncoder) ++segment;
    if (group.tokens.empty()) continue;
    (encoder ? encoder_ : decoder_)
        .push_back({&group, first[encoder], segment});
    first[encoder] += group.tokens.size();
  }
}

void CpuEncoderDecoder::Embed() {
  weights_.embedding.LookUp(*kernels_, ids_, act_.residual, hidden_dim());
  if (config_.embedding_scale != 1) {
    kernels_->Scale(config_.embedding_scale, num_rows_ * hidden_dim(),
                    act_.residual);
  }
}

cpu::AttentionShape CpuEncoderDecoder::ShapeOf(
    const KvLayout& layout, uint32_t layer,
    const cpu::DistanceBias* bias) const {
  return {.num_heads = config_.num_heads,
          .layer = layer,
          .layout = layout,
          .scale = AttentionScale(config_),
          .distance_bias = bias};
}

// Every group of a segment sees all views of that segment, itself included.
void CpuEncoderDecoder::DescribeEncoder() {
  ids_.clear();
  writes_.clear();
  attention_.clear();
  segment_views_.clear();
  segment_views_.reserve(encoder_.size());
  for (const Rows& rows : encoder_) {
    const RowGroup& group = *rows.group;
    ids_.insert(ids_.end(), group.tokens.begin(), group.tokens.end());
    segment_views_.push_back({.pages = &act_.encoder_kv,
                              .first_token = static_cast<uint32_t>(rows.first),
                              .num_tokens = rows.count(),
                              .local_position = group.position});
    const float* qkv = act_.qkv + rows.first * qkv_dim();
    writes_.push_back({.keys = qkv + query_dim(),
                       .values = qkv + query_dim() + kv_dim(),
                       .row_stride = qkv_dim(),
                       .num_rows = rows.count(),
                       .position = group.position,
                       .own = segment_views_.back(),
                       .write_pages = &act_.encoder_kv});
  }
  size_t begin = 0;
  for (size_t i = 0; i < encoder_.size(); ++i) {
    if (encoder_[i].segment != encoder_[begin].segment) begin = i;
    size_t end = i + 1;
    while (end < encoder_.size() &&
           encoder_[end].segment == encoder_[i].segment) {
      ++end;
    }
    const Rows& rows = encoder_[i];
    attention_.push_back(
        {.queries = act_.qkv + rows.first * qkv_dim(),
         .query_stride = qkv_dim(),
         .out = act_.attention + rows.first * query_dim(),
         .out_stride = query_dim(),
         .num_rows = rows.count(),
         .position = rows.group->position,
         .visible = std::span(segment_views_).subspan(begin, end - begin)});
  }
  num_rows_ = ids_.size();
}

// Leaves the encoder's output in act_.residual.
void CpuEncoderDecoder::RunEncoder() {
  DescribeEncoder();
  Embed();
  const KvLayout layout = {
      .num_layers = 1,
      .num_kv_heads = config_.num_kv_heads,
      .head_dim = config_.head_dim,
      .page_tokens = static_cast<uint32_t>(act_.capacity_rows)};
  const cpu::AttentionShape shape = ShapeOf(layout, 0, &encoder_bias_);
  for (const CpuLayerWeights& layer : weights_.encoder.layers) {
    AttendToSelf(layer, shape);
    RunFeedForward(layer);
  }
  Normalize(weights_.encoder.output_norm, act_.residual, num_rows_,
            act_.residual);
}

// Keys and values of the encoder's output, for every layer of the decoder, to
// where each group's `own` says.
void CpuEncoderDecoder::WriteCrossStates() {
  for (size_t i = 0; i < encoder_.size(); ++i) {
    const RowGroup& group = *encoder_[i].group;
    cpu::KvWrite& write = writes_[i];
    write.keys = act_.qkv + encoder_[i].first * qkv_dim();
    write.values = write.keys + kv_dim();
    write.own = group.own;
    write.write_pages = group.own_write_pages;
  }
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    Project(act_.residual, hidden_dim(), weights_.encoder.cross[i].key_value,
            act_.qkv, qkv_dim());
    kernels_->WriteKv(ShapeOf(layout_, i, nullptr), writes_);
  }
}

void CpuEncoderDecoder::DescribeDecoder() {
  ids_.clear();
  writes_.clear();
  for (const Rows& rows : decoder_) {
    const RowGroup& group = *rows.group;
    ids_.insert(ids_.end(), group.tokens.begin(), group.tokens.end());
    const float* qkv = act_.qkv + rows.first * qkv_dim();
    writes_.push_back({.keys = qkv + query_dim(),
                       .values = qkv + query_dim() + kv_dim(),
                       .row_stride = qkv_dim(),
                       .num_rows = rows.count(),
                       .position = group.position,
                       .own = group.own,
                       .write_pages = group.own_write_pages});
  }
  num_rows_ = ids_.size();
}

void CpuEncoderDecoder::RunDecoder() {
  DescribeDecoder();
  Embed();
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    attention_.clear();
    for (const Rows& rows : decoder_) {
      attention_.push_back({.queries = act_.qkv + rows.first * qkv_dim(),
                            .query_stride = qkv_dim(),
                            .out = act_.attention + rows.first * query_dim(),
                            .out_stride = query_dim(),
                            .num_rows = rows.count(),
                            .position = rows.group->position,
                            .own = rows.group->own});
    }
    AttendToSelf(weights_.layers[i], ShapeOf(layout_, i, &decoder_bias_));
    AttendToEncoder(i);
    RunFeedForward(weights_.layers[i]);
  }
}

void CpuEncoderDecoder::AttendToEncoder(uint32_t layer) {
  const CpuCrossWeights& cross = weights_.encoder.cross[layer];
  ForBlocks([&](size_t row, size_t rows) {
    Normalize(cross.norm, act_.residual + row * hidden_dim(), rows,
              act_.normed);
    cross.query.weights.Multiply(*kernels_, act_.normed, hidden_dim(), rows,
                                 act_.qkv + row * qkv_dim(), qkv_dim());
  });
  for (size_t i = 0; i < decoder_.size(); ++i) {
    attention_[i].visible = decoder_[i].group->visible;
    attention_[i].own = {};
  }
  kernels_->Attend(ShapeOf(layout_, layer, nullptr), attention_);
  AddAttention(cross.out);
}

// residual += attention over what attention_ says, after writes_.
void CpuEncoderDecoder::AttendToSelf(const CpuLayerWeights& layer,
                                     const cpu::AttentionShape& shape) {
  ForBlocks([&](size_t row, size_t rows) {
    Normalize(layer.attention_norm, act_.residual + row * hidden_dim(), rows,
              act_.normed);
    layer.qkv.weights.Multiply(*kernels_, act_.normed, hidden_dim(), rows,
                               act_.qkv + row * qkv_dim(), qkv_dim());
  });
  kernels_->WriteKv(shape, writes_);
  kernels_->Attend(shape, attention_);
  AddAttention(layer.attention_out);
}

void CpuEncoderDecoder::AddAttention(const CpuProjection& out) {
  ForBlocks([&](size_t row, size_t rows) {
    float* residual = act_.residual + row * hidden_dim();
    out.weights.Multiply(*kernels_, act_.attention + row * query_dim(),
                         query_dim(), rows, residual, hidden_dim(),
                         {.residual = residual});
  });
}

void CpuEncoderDecoder::RunFeedForward(const CpuLayerWeights& layer) {
  const bool gated = config_.gated_ffn;
  const size_t stride = GateUpStride(gated ? 2 * ffn_dim() : ffn_dim());
  ForBlocks([&](size_t row, size_t rows) {
    float* residual = act_.residual + row * hidden_dim();
    Normalize(layer.ffn_norm, residual, rows, act_.normed);
    layer.gate_up.weights.Multiply(*kernels_, act_.normed, hidden_dim(), rows,
                                   act_.gate_up, stride);
    kernels_->Activate(activation_, act_.gate_up,
                       gated ? act_.gate_up + ffn_dim() : nullptr, stride, rows,
                       ffn_dim(), act_.gated);
    layer.down.weights.Multiply(*kernels_, act_.gated, ffn_dim(), rows,
                                residual, hidden_dim(), {.residual = residual});
  });
}

void CpuEncoderDecoder::Project(const float* in, size_t depth,
                                const CpuProjection& projection, float* out,
                                size_t stride) {
  ForBlocks([&](size_t row, size_t rows) {
    projection.weights.Multiply(*kernels_, in + row * depth, depth, rows,
                                out + row * stride, stride);
  });
}

void CpuEncoderDecoder::Normalize(const CpuNorm& norm, const float* x,
                                  size_t num_rows, float* out) {
  kernels_->RmsNorm(x, norm.weight.data(), config_.norm_epsilon, num_rows,
                    hidden_dim(), out);
}

// Only rows that want logits are copied together and go on.
void CpuEncoderDecoder::RunHead(float* logits) {
  const size_t block = std::min(act_.capacity_rows, kBlockRows);
  size_t gathered = 0;
  const auto flush = [&] {
    if (gathered == 0) return;
    Normalize(weights_.output_norm, act_.normed, gathered, act_.normed);
    weights_.head().Multiply(*kernels_, act_.normed, hidden_dim(), gathered,
                             logits, config_.vocab_size);
    logits += gathered * config_.vocab_size;
    gathered = 0;
  };
  for (const Rows& rows : decoder_) {
    const size_t end = rows.first + rows.count();
    for (size_t row = end - NumLogitRows(*rows.group); row < end; ++row) {
      std::memcpy(act_.normed + gathered * hidden_dim(),
                  act_.residual + row * hidden_dim(),
                  hidden_dim() * sizeof(float));
      if (++gathered == block) flush();
    }
  }
  flush();
}

}  // namespace

std::unique_ptr<Backend> CreateCpuEncoderDecoder(
    const ModelConfig& config, uint32_t page_tokens,
    std::unique_ptr<cpu::Kernels> kernels, CpuWeights weights) {
  return std::make_unique<CpuEncoderDecoder>(
      config, page_tokens, std::move(kernels), std::move(weights));
}

}  // namespace promptcache::worker
