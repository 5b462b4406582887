#include "inference_worker/engine/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_activation.h"
#include "inference_worker/engine/cpu_encoder_decoder.h"
#include "inference_worker/engine/cpu_weights.h"
#include "inference_worker/engine/families/config_check.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/reuse.h"
#include "inference_worker/engine/pass_buffers.h"
#include "inference_worker/engine/row_groups.h"
#include "inference_worker/engine/shared_views.h"

namespace promptcache::worker {
namespace {

// What turns and biases keys and queries; empty what the model does not use.
struct PositionTables {
  std::optional<cpu::RopeTable> rope;
  std::optional<cpu::RopeTable> local_rope;  // of layers with a window
  std::vector<float> alibi_slopes;
};

absl::StatusOr<cpu::RopeTable> MakeRopeTable(const ModelConfig& config,
                                             bool local) {
  PC_ASSIGN_OR_RETURN(Rotation rotation, RotationOf(config, local));
  return cpu::RopeTable::Create({
      .inv_freq = std::move(rotation.inv_freq),
      .factor = rotation.factor,
      .pairing = config.rope.pairing == RopePairing::kInterleaved
                     ? cpu::Pairing::kInterleaved
                     : cpu::Pairing::kHalfSplit,
      .max_position = static_cast<int32_t>(UsableContext(config)) - 1,
  });
}

absl::StatusOr<PositionTables> MakePositionTables(const ModelConfig& config) {
  PositionTables tables;
  if (config.positions == PositionKind::kAlibi) {
    tables.alibi_slopes = AlibiSlopes(config);
  }
  if (config.positions != PositionKind::kRope) return tables;
  PC_ASSIGN_OR_RETURN(tables.rope, MakeRopeTable(config, /*local=*/false));
  if (config.local_rope_theta > 0 && !config.layer_windows.empty()) {
    PC_ASSIGN_OR_RETURN(tables.local_rope,
                        MakeRopeTable(config, /*local=*/true));
  }
  return tables;
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const ModelConfig& config, uint32_t page_tokens,
             std::unique_ptr<cpu::Kernels> kernels, PositionTables positions,
             CpuWeights weights)
      : config_(config),
        layout_{.num_layers = config.num_layers,
                .num_kv_heads = config.num_kv_heads,
                .head_dim = config.head_dim,
                .page_tokens = page_tokens},
        numerics_(absl::StrCat(weights.quantized ? "fast/" : "exact/",
                               kernels->name())),
        kernels_(std::move(kernels)),
        activation_(CpuActivationOf(config.activation)),
        context_length_(UsableContext(config)),
        positions_(std::move(positions)),
        weights_(std::move(weights)) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;

  AttentionReads attention_reads() const override {
    return {reads_.needed_tokens / config_.num_layers,
            reads_.read_tokens / config_.num_layers};
  }
  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return config_.vocab_size; }
  uint32_t context_length() const override { return context_length_; }
  const std::string& numerics() const override { return numerics_; }
  uint32_t num_threads() const override { return kernels_->num_threads(); }

 private:
  size_t hidden_dim() const { return config_.hidden_dim; }
  size_t ffn_dim() const { return config_.ffn_dim; }
  size_t query_dim() const {
    return size_t{config_.num_heads} * config_.head_dim;
  }
  size_t kv_dim() const {
    return size_t{config_.num_kv_heads} * config_.head_dim;
  }
  size_t qkv_dim() const { return query_dim() + 2 * kv_dim(); }

  RowWidths Widths() const {
    return {.hidden = hidden_dim(),
            .query = query_dim(),
            .qkv = qkv_dim(),
            .ffn = ffn_dim()};
  }
  void DescribePass(std::span<const RowGroup> groups);
  void Embed(size_t num_rows);
  cpu::AttentionShape ShapeOf(uint32_t layer) const;
  void RunLayer(uint32_t index, size_t num_rows);
  void ProjectQkv(const CpuLayerWeights& layer, const float* residual,
                  size_t num_rows, float* qkv);
  void RunFeedForward(const CpuLayerWeights& layer, float* residual,
                      size_t num_rows);
  void Normalize(const CpuNorm& norm, const float* x, size_t num_rows,
                 float* out);
  void AddProduct(const float* a, size_t depth, size_t num_rows,
                  const CpuProjection& projection, const CpuNorm& post_norm,
                  float* residual);
  void RunHead(std::span<const RowGroup> groups, float* logits);
  void ProjectToVocabulary(size_t num_rows, float* logits);

  const ModelConfig config_;
  const KvLayout layout_;
  const std::string numerics_;
  const std::unique_ptr<cpu::Kernels> kernels_;
  const cpu::Activation activation_;
  const uint32_t context_length_;
  const PositionTables positions_;
  const CpuWeights weights_;

  // Of the pass that is running; kept for the next one's sake.
  PassBuffers act_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> table_rows_;  // of learned positions
  std::vector<cpu::KvWrite> writes_;
  std::vector<cpu::AttentionGroup> attention_;
  SharedViews shared_views_;
  cpu::AttentionReads reads_;  // of all layers together
};

absl::Status CpuBackend::Forward(std::span<const RowGroup> groups,
                                 std::vector<float>* logits) {
  reads_ = {};
  const PassLimits limits = {
      .layout = layout_,
      .vocab_size = config_.vocab_size,
      .max_distance = static_cast<int32_t>(context_length_) - 1,
      .num_positions = config_.positions == PositionKind::kLearned
                           ? config_.context_length
                           : 0,
  };
  PC_RETURN_IF_ERROR(CheckRowGroups(groups, limits));
  size_t num_rows = 0;
  size_t num_logit_rows = 0;
  for (const RowGroup& group : groups) {
    num_rows += group.tokens.size();
    num_logit_rows += NumLogitRows(group);
  }
  PC_RETURN_IF_ERROR(act_.Reserve(num_rows, Widths()));
  logits->resize(num_logit_rows * config_.vocab_size);
  if (num_rows == 0) return absl::OkStatus();

  DescribePass(groups);
  Embed(num_rows);
  for (uint32_t i = 0; i < config_.num_layers; ++i) RunLayer(i, num_rows);
  RunHead(groups, logits->data());
  return absl::OkStatus();
}

// Rows of all groups lie one after the other; the kernels' views of them are
// the same in every layer.
void CpuBackend::DescribePass(std::span<const RowGroup> groups) {
  ids_.clear();
  table_rows_.clear();
  writes_.clear();
  attention_.clear();
  shared_views_.Find(groups, layout_.page_tokens);
  for (size_t g = 0; g < groups.size(); ++g) {
    const RowGroup& group = groups[g];
    if (group.tokens.empty()) continue;
    const size_t first = ids_.size();
    const auto num_rows = static_cast<uint32_t>(group.tokens.size());
    ids_.insert(ids_.end(), group.tokens.begin(), group.tokens.end());
    const auto table_row = group.position + group.embedding_position_offset +
                           static_cast<int32_t>(config_.position_table_offset);
    for (uint32_t row = 0; row < num_rows; ++row) {
      table_rows_.push_back(table_row + static_cast<int32_t>(row));
    }
    const float* qkv = act_.qkv + first * qkv_dim();
    writes_.push_back({.keys = qkv + query_dim(),
                       .values = qkv + query_dim() + kv_dim(),
                       .row_stride = qkv_dim(),
                       .num_rows = num_rows,
                       .position = group.position,
                       .own = group.own,
                       .write_pages = group.own_write_pages});
    attention_.push_back({.queries = qkv,
                          .query_stride = qkv_dim(),
                          .out = act_.attention + first * query_dim(),
                          .out_stride = query_dim(),
                          .num_rows = num_rows,
                          .position = group.position,
                          .visible = group.visible,
                          .view_ids = shared_views_.ids(g),
                          .own = group.own});
  }
}

void CpuBackend::Embed(size_t num_rows) {
  weights_.embedding.LookUp(*kernels_, ids_, act_.residual, hidden_dim());
  if (config_.embedding_scale != 1) {
    kernels_->Scale(config_.embedding_scale, num_rows * hidden_dim(),
                    act_.residual);
  }
  if (weights_.positions.num_rows() == 0) return;
  for (size_t row = 0; row < num_rows; row += kBlockRows) {
    const size_t rows = std::min(kBlockRows, num_rows - row);
    weights_.positions.LookUp(*kernels_,
                              std::span(table_rows_).subspan(row, rows),
                              act_.normed, hidden_dim());
    kernels_->Add(act_.normed, rows * hidden_dim(),
                  act_.residual + row * hidden_dim());
  }
}

cpu::AttentionShape CpuBackend::ShapeOf(uint32_t layer) const {
  const uint32_t window =
      config_.layer_windows.empty() ? 0 : config_.layer_windows[layer];
  const std::optional<cpu::RopeTable>& rope =
      window > 0 && positions_.local_rope.has_value() ? positions_.local_rope
                                                      : positions_.rope;
  return {.num_heads = config_.num_heads,
          .layer = layer,
          .layout = layout_,
          .scale = AttentionScale(config_),
          .rope = rope.has_value() ? &*rope : nullptr,
          .alibi_slopes = DataOrNull(positions_.alibi_slopes),
          .window = window};
}

void CpuBackend::RunLayer(uint32_t index, size_t num_rows) {
  const CpuLayerWeights& layer = weights_.layers[index];
  for (size_t row = 0; row < num_rows; row += kBlockRows) {
    ProjectQkv(layer, act_.residual + row * hidden_dim(),
               std::min(kBlockRows, num_rows - row),
               act_.qkv + row * qkv_dim());
  }
  // All of the pass's keys and values before any attention: a group may see
  // what another one writes.
  const cpu::AttentionShape shape = ShapeOf(index);
  kernels_->WriteKv(shape, writes_);
  const cpu::AttentionReads reads = kernels_->Attend(shape, attention_);
  reads_.needed_tokens += reads.needed_tokens;
  reads_.read_tokens += reads.read_tokens;
  const bool parallel = config_.residual == ResidualKind::kParallel;
  for (size_t row = 0; row < num_rows; row += kBlockRows) {
    const size_t rows = std::min(kBlockRows, num_rows - row);
    float* residual = act_.residual + row * hidden_dim();
    const float* attention = act_.attention + row * query_dim();
    // What a parallel feed-forward block sees is without the attention.
    if (parallel) Normalize(layer.ffn_norm, residual, rows, act_.normed);
    AddProduct(attention, query_dim(), rows, layer.attention_out,
               layer.post_attention_norm, residual);
    if (!parallel) Normalize(layer.ffn_norm, residual, rows, act_.normed);
    RunFeedForward(layer, residual, rows);
  }
}

void CpuBackend::ProjectQkv(const CpuLayerWeights& layer, const float* residual,
                            size_t num_rows, float* qkv) {
  Normalize(layer.attention_norm, residual, num_rows, act_.normed);
  layer.qkv.weights.Multiply(*kernels_, act_.normed, hidden_dim(), num_rows,
                             qkv, qkv_dim(),
                             {.bias = DataOrNull(layer.qkv.bias)});
  if (layer.query_norm.empty()) return;
  kernels_->RmsNormHeads(layer.query_norm.data(), config_.norm_epsilon,
                         num_rows, qkv_dim(), config_.num_heads,
                         config_.head_dim, qkv);
  kernels_->RmsNormHeads(layer.key_norm.data(), config_.norm_epsilon, num_rows,
                         qkv_dim(), config_.num_kv_heads, config_.head_dim,
                         qkv + query_dim());
}

// Of the rows in act_.normed.
void CpuBackend::RunFeedForward(const CpuLayerWeights& layer, float* residual,
                                size_t num_rows) {
  const bool gated = config_.gated_ffn;
  const size_t stride = GateUpStride(gated ? 2 * ffn_dim() : ffn_dim());
  layer.gate_up.weights.Multiply(*kernels_, act_.normed, hidden_dim(), num_rows,
                                 act_.gate_up, stride,
                                 {.bias = DataOrNull(layer.gate_up.bias)});
  kernels_->Activate(activation_, act_.gate_up,
                     gated ? act_.gate_up + ffn_dim() : nullptr, stride,
                     num_rows, ffn_dim(), act_.gated);
  AddProduct(act_.gated, ffn_dim(), num_rows, layer.down, layer.post_ffn_norm,
             residual);
}

void CpuBackend::Normalize(const CpuNorm& norm, const float* x, size_t num_rows,
                           float* out) {
  if (config_.norm == NormKind::kLayer) {
    kernels_->LayerNorm(x, norm.weight.data(), DataOrNull(norm.bias),
                        config_.norm_epsilon, num_rows, hidden_dim(), out);
  } else {
    kernels_->RmsNorm(x, norm.weight.data(), config_.norm_epsilon, num_rows,
                      hidden_dim(), out);
  }
}

// residual += a W^T + bias, normed before it is added where there is such a
// norm: then act_.normed is lost.
void CpuBackend::AddProduct(const float* a, size_t depth, size_t num_rows,
                            const CpuProjection& projection,
                            const CpuNorm& post_norm, float* residual) {
  const float* bias = DataOrNull(projection.bias);
  if (post_norm.weight.empty()) {
    projection.weights.Multiply(*kernels_, a, depth, num_rows, residual,
                                hidden_dim(),
                                {.bias = bias, .residual = residual});
    return;
  }
  projection.weights.Multiply(*kernels_, a, depth, num_rows, act_.normed,
                              hidden_dim(), {.bias = bias});
  Normalize(post_norm, act_.normed, num_rows, act_.normed);
  kernels_->Add(act_.normed, num_rows * hidden_dim(), residual);
}

// Only rows that want logits are copied together and go on.
void CpuBackend::RunHead(std::span<const RowGroup> groups, float* logits) {
  const size_t block = std::min(act_.capacity_rows, kBlockRows);
  size_t gathered = 0;
  size_t group_end = 0;
  for (const RowGroup& group : groups) {
    group_end += group.tokens.size();
    for (size_t row = group_end - NumLogitRows(group); row < group_end; ++row) {
      std::memcpy(act_.normed + gathered * hidden_dim(),
                  act_.residual + row * hidden_dim(),
                  hidden_dim() * sizeof(float));
      if (++gathered < block) continue;
      ProjectToVocabulary(gathered, logits);
      logits += gathered * config_.vocab_size;
      gathered = 0;
    }
  }
  ProjectToVocabulary(gathered, logits);
}

void CpuBackend::ProjectToVocabulary(size_t num_rows, float* logits) {
  if (num_rows == 0) return;
  Normalize(weights_.output_norm, act_.normed, num_rows, act_.normed);
  weights_.head().Multiply(*kernels_, act_.normed, hidden_dim(), num_rows,
                           logits, config_.vocab_size,
                           {.bias = DataOrNull(weights_.output_bias)});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(
    const ModelFile& file, const CpuBackendOptions& options) {
  const ModelConfig& config = file.config();
  PC_RETURN_IF_ERROR(CheckConfig(config));
  const KvLayout layout = {.num_layers = config.num_layers,
                           .num_kv_heads = config.num_kv_heads,
                           .head_dim = config.head_dim,
                           .page_tokens = options.page_tokens};
  PC_RETURN_IF_ERROR(layout.Validate());
  PC_ASSIGN_OR_RETURN(std::unique_ptr<cpu::Kernels> kernels,
                      cpu::Kernels::Create({
                          .name = options.kernels,
                          .num_threads = options.num_threads,
                      }));
  PC_ASSIGN_OR_RETURN(PositionTables positions, MakePositionTables(config));
  PC_ASSIGN_OR_RETURN(CpuWeights weights,
                      LoadCpuWeights(file, options.numerics != Numerics::kExact,
                                     *kernels, options.progress));
  if (options.numerics == Numerics::kFast && !weights.quantized) {
    return absl::InvalidArgumentError(absl::StrCat(
        "numerics \"fast\": ", file.path(),
        " has no matrix of a type that is multiplied as it is; use exact"));
  }
  if (config.is_encoder_decoder()) {
    return CreateCpuEncoderDecoder(config, options.page_tokens,
                                   std::move(kernels), std::move(weights));
  }
  return std::make_unique<CpuBackend>(config, options.page_tokens,
                                      std::move(kernels), std::move(positions),
                                      std::move(weights));
}

}  // namespace promptcache::worker
