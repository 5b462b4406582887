#include "inference_worker/engine/cuda_backend.h"

#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "inference_worker/engine/cuda_attention.h"
#include "inference_worker/engine/cuda_encoder_decoder.h"
#include "inference_worker/engine/cuda_head.h"
#include "inference_worker/engine/cuda_layers.h"
#include "inference_worker/engine/cuda_model.h"
#include "inference_worker/engine/cuda_weights.h"
#include "inference_worker/engine/families/config_check.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/reuse.h"
#include "inference_worker/engine/pass_graphs.h"
#include "inference_worker/engine/pass_input.h"
#include "inference_worker/engine/row_groups.h"

namespace promptcache::worker {
namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const ModelConfig& config, const CudaBackendOptions& options,
              std::unique_ptr<CudaLayers> layers, CudaPositions positions,
              CudaWeights weights)
      : config_(config),
        options_(options),
        layout_{.num_layers = config.num_layers,
                .num_kv_heads = config.num_kv_heads,
                .head_dim = config.head_dim,
                .page_tokens = options.page_tokens},
        numerics_(CudaNumerics(options)),
        context_length_(UsableContext(config)),
        positions_(std::move(positions)),
        weights_(std::move(weights)),
        layers_(std::move(layers)),
        input_(*options.device),
        attention_(*options.device,
                   PlanOptions(config, options, options.page_tokens)),
        head_(*layers_, weights_, config.vocab_size) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;

  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return config_.vocab_size; }
  uint32_t context_length() const override { return context_length_; }
  const std::string& numerics() const override { return numerics_; }
  uint32_t num_threads() const override { return 1; }
  bool chooses_tokens() const override { return true; }

 private:
  absl::Status Run(std::vector<float>* logits);
  void DescribePass(std::span<const RowGroup> groups);
  absl::Status Prepare();
  absl::Status RunLayers();
  absl::Status RunLayer(uint32_t index);
  absl::Status Attend(uint32_t index, const gpu::RopeView* rope);
  PassGraphs::Key KeyOfPass() const;

  const ModelConfig config_;
  const CudaBackendOptions options_;
  const KvLayout layout_;
  const std::string numerics_;
  const uint32_t context_length_;
  const CudaPositions positions_;
  const CudaWeights weights_;
  const std::unique_ptr<CudaLayers> layers_;

  // Of the pass that is running; kept for the next one's sake.
  PassInput input_;
  CudaAttention attention_;
  CudaHead head_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> table_rows_;  // of learned positions
  std::vector<gpu::KvSlot> slots_;
  std::vector<gpu::AttentionGroup> groups_;
  PassArrivals arrivals_;
  int32_t num_rows_ = 0;
  size_t ids_at_ = 0;
  size_t table_rows_at_ = 0;
  size_t slots_at_ = 0;

  PassGraphs graphs_;
};

absl::Status CudaBackend::Forward(std::span<const RowGroup> groups,
                                  std::vector<float>* logits) {
  const PassLimits limits = {
      .layout = layout_,
      .vocab_size = config_.vocab_size,
      .max_distance = static_cast<int32_t>(context_length_) - 1,
      .num_positions = config_.positions == PositionKind::kLearned
                           ? config_.context_length
                           : 0,
      .chooses_tokens = true,
  };
  PC_RETURN_IF_ERROR(CheckRowGroups(groups, limits));
  DescribePass(groups);
  logits->resize(static_cast<size_t>(head_.num_returned()) *
                 config_.vocab_size);
  if (num_rows_ == 0) return absl::OkStatus();
  PC_RETURN_IF_ERROR(options_.device->MakeCurrent());
  const absl::Status status = Run(logits);
  if (status.ok()) return status;
  // Nothing may run any more when the caller gives pages back.
  layers_->stream().Synchronize().IgnoreError();  // the first error is told
  return status;
}

// Rows of all groups lie one after the other.
void CudaBackend::DescribePass(std::span<const RowGroup> groups) {
  ids_.clear();
  table_rows_.clear();
  head_.Clear();
  slots_.clear();
  groups_.clear();
  arrivals_.Clear();
  for (const RowGroup& group : groups) {
    if (group.tokens.empty()) continue;
    arrivals_.Add(group.arrivals);
    const auto first = static_cast<uint32_t>(ids_.size());
    const auto num_rows = static_cast<uint32_t>(group.tokens.size());
    ids_.insert(ids_.end(), group.tokens.begin(), group.tokens.end());
    const int32_t table_row =
        group.position + group.embedding_position_offset +
        static_cast<int32_t>(config_.position_table_offset);
    for (uint32_t row = 0; row < num_rows; ++row) {
      table_rows_.push_back(table_row + static_cast<int32_t>(row));
    }
    const size_t end = ids_.size();
    for (size_t row = end - NumLogitRows(group); row < end; ++row) {
      head_.Add(static_cast<int32_t>(row), group.choice);
    }
    AppendSlots(group, group.own, group.own_write_pages, layout_.page_tokens,
                &slots_);
    groups_.push_back({.first_row = first,
                       .num_rows = num_rows,
                       .position = group.position,
                       .visible = group.visible,
                       .own = group.own});
  }
  num_rows_ = static_cast<int32_t>(ids_.size());
}

// What the device is told, and room for what it computes.
absl::Status CudaBackend::Prepare() {
  input_.Clear();
  ids_at_ = input_.Add(ids_);
  table_rows_at_ = input_.Add(table_rows_);
  head_.AddTo(input_);
  slots_at_ = input_.Add(slots_);
  attention_.Plan(groups_, input_);
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(input_.Reserve()));
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(attention_.Reserve()));
  PC_RETURN_IF_ERROR(
      graphs_.AfterReserve(layers_->Reserve(num_rows_, head_.num_rows())));
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(head_.Reserve()));
  return input_.Upload(layers_->stream());
}

PassGraphs::Key CudaBackend::KeyOfPass() const {
  const gpu::AttentionGrid& grid = attention_.grid();
  PassGraphs::Key key = {static_cast<size_t>(num_rows_),
                         static_cast<size_t>(head_.num_rows()),
                         static_cast<size_t>(head_.num_returned()),
                         grid.large_items,
                         grid.small_items,
                         grid.merged_rows};
  key.insert(key.end(), input_.layout().begin(), input_.layout().end());
  return key;
}

absl::Status CudaBackend::Run(std::vector<float>* logits) {
  PC_RETURN_IF_ERROR(Prepare());
  // A graph waits for nothing but its own work.
  if (options_.graphs && arrivals_.empty() &&
      num_rows_ <= PassGraphs::kMaxRows) {
    const auto pass = [this] {
      PC_RETURN_IF_ERROR(RunLayers());
      return head_.Run(input_);
    };
    PC_RETURN_IF_ERROR(graphs_.Run(KeyOfPass(), layers_->stream(), pass));
    return head_.Read(logits->data());
  }
  PC_RETURN_IF_ERROR(RunLayers());
  return head_.RunAndRead(input_, logits->data());
}

absl::Status CudaBackend::RunLayers() {
  PC_RETURN_IF_ERROR(layers_->Embed(weights_, input_.At<int32_t>(ids_at_),
                                    input_.At<int32_t>(table_rows_at_),
                                    num_rows_));
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    PC_RETURN_IF_ERROR(RunLayer(i));
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::RunLayer(uint32_t index) {
  const CudaLayer& layer = weights_.layers[index];
  const CudaActivations& act = layers_->act();
  const bool windowed =
      !config_.layer_windows.empty() && config_.layer_windows[index] > 0;
  const gpu::RopeView* rope = positions_.RopeOf(windowed);
  PC_RETURN_IF_ERROR(layers_->Normalize(layer.attention_norm, num_rows_));
  PC_RETURN_IF_ERROR(
      layers_->Multiply(act.normed, layer.qkv.weights, num_rows_, act.qkv));
  // All of the pass's keys and values before any attention: a group may see
  // what another one writes.
  PC_RETURN_IF_ERROR(layers_->SplitQkv(
      layer.qkv.bias, layer.query_norm, layer.key_norm,
      {.slots = input_.At<gpu::KvSlot>(slots_at_),
       .page_tokens = static_cast<int32_t>(layout_.page_tokens),
       .key_offset_bytes = layout_.key_offset_bytes(index),
       .value_offset_bytes = layout_.value_offset_bytes(index),
       .rope = rope != nullptr ? *rope : gpu::RopeView{}},
      num_rows_));
  PC_RETURN_IF_ERROR(Attend(index, rope));
  // What a parallel feed-forward block sees is without the attention.
  const bool parallel = config_.residual == ResidualKind::kParallel;
  if (parallel) {
    PC_RETURN_IF_ERROR(layers_->Normalize(layer.ffn_norm, num_rows_));
  }
  PC_RETURN_IF_ERROR(layers_->AddProduct(act.attention, layer.attention_out,
                                         layer.post_attention_norm, num_rows_));
  if (!parallel) {
    PC_RETURN_IF_ERROR(layers_->Normalize(layer.ffn_norm, num_rows_));
  }
  return layers_->FeedForward(layer, num_rows_);
}

absl::Status CudaBackend::Attend(uint32_t index, const gpu::RopeView* rope) {
  const CudaActivations& act = layers_->act();
  const size_t query_dim = size_t{config_.num_heads} * config_.head_dim;
  gpu::AttentionParams params = {
      .q = act.queries,
      .q_stride = query_dim,
      .out = act.attention,
      .out_stride = query_dim,
      .key_offset_bytes = layout_.key_offset_bytes(index),
      .value_offset_bytes = layout_.value_offset_bytes(index),
      .head_stride_bytes = layout_.head_stride_bytes(),
      .scale = AttentionScale(config_),
      .alibi_slopes = positions_.alibi_slopes,
      .window =
          config_.layer_windows.empty() ? 0 : config_.layer_windows[index],
  };
  if (rope != nullptr) {
    params.rope = rope->table;
    params.rope_pairs = static_cast<uint32_t>(rope->num_pairs);
    params.rope_interleaved = rope->interleaved;
    const bool scaled =
        positions_.rope.has_value() && rope == &*positions_.rope;
    params.rope_factor = scaled ? positions_.factor : 1.0f;
  }
  arrivals_.AwaitLayers(index + 1);
  return attention_.Launch(params, input_, layers_->stream());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(
    const ModelFile& file, const CudaBackendOptions& options) {
  const ModelConfig& config = file.config();
  PC_RETURN_IF_ERROR(CheckConfig(config));
  PC_RETURN_IF_ERROR(CheckCudaModel(config, options));
  const KvLayout layout = {.num_layers = config.num_layers,
                           .num_kv_heads = config.num_kv_heads,
                           .head_dim = config.head_dim,
                           .page_tokens = options.page_tokens};
  PC_RETURN_IF_ERROR(layout.Validate());
  gpu::Device& device = *options.device;
  PC_RETURN_IF_ERROR(device.MakeCurrent());
  PC_ASSIGN_OR_RETURN(
      std::unique_ptr<CudaLayers> layers,
      CudaLayers::Create(device, config,
                         {.batch_invariant = options.batch_invariant,
                          .invariant_rows = options.invariant_rows}));
  PC_ASSIGN_OR_RETURN(CudaPositions positions,
                      MakeCudaPositions(config, device));
  PC_ASSIGN_OR_RETURN(CudaWeights weights,
                      LoadCudaWeights(file, device, options.progress));
  if (config.is_encoder_decoder()) {
    return CreateCudaEncoderDecoder(config, options, std::move(layers),
                                    std::move(weights));
  }
  return std::make_unique<CudaBackend>(config, options, std::move(layers),
                                       std::move(positions),
                                       std::move(weights));
}

}  // namespace promptcache::worker
