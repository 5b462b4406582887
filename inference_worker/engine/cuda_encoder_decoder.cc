#include "inference_worker/engine/cuda_encoder_decoder.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "inference_worker/engine/cuda_attention.h"
#include "inference_worker/engine/cuda_head.h"
#include "inference_worker/engine/cuda_model.h"
#include "inference_worker/engine/cuda_readback.h"
#include "inference_worker/engine/families/positions.h"
#include "inference_worker/engine/families/relative_bias.h"
#include "inference_worker/engine/pass_graphs.h"
#include "inference_worker/engine/pass_input.h"
#include "inference_worker/engine/row_groups.h"

namespace promptcache::worker {
namespace {

// Of the encoder's own keys and values, which no other pass sees.
constexpr uint32_t kEncoderPageTokens = 16;

// [head][2 * reach + 1], what a head adds to its logits by the distance.
absl::StatusOr<gpu::DeviceBuffer> MakeBias(const ModelConfig& config,
                                           const std::vector<float>& table,
                                           bool both_ways,
                                           gpu::Device& device) {
  const auto reach = static_cast<int32_t>(config.relative_max_distance);
  std::vector<float> values;
  for (uint32_t head = 0; head < config.num_heads; ++head) {
    for (int32_t distance = -reach; distance <= reach; ++distance) {
      const uint32_t bucket =
          RelativeBucket(distance, config.relative_buckets,
                         config.relative_max_distance, both_ways);
      values.push_back(table[size_t{bucket} * config.num_heads + head]);
    }
  }
  return ToDevice(device, values.data(), values.size());
}

class CudaEncoderDecoder final : public Backend {
 public:
  CudaEncoderDecoder(const ModelConfig& config,
                     const CudaBackendOptions& options,
                     std::unique_ptr<CudaLayers> layers, CudaWeights weights)
      : config_(config),
        options_(options),
        layout_(LayoutOf(config.num_layers, options.page_tokens)),
        encoder_layout_(LayoutOf(1, kEncoderPageTokens)),
        numerics_(CudaNumerics(options)),
        weights_(std::move(weights)),
        layers_(std::move(layers)),
        input_(*options.device),
        encoder_attention_(*options.device,
                           PlanOptions(config, options, kEncoderPageTokens)),
        self_attention_(*options.device,
                        PlanOptions(config, options, options.page_tokens)),
        cross_attention_(*options.device,
                         PlanOptions(config, options, options.page_tokens)),
        head_(*layers_, weights_, config.vocab_size),
        readback_(*options.device) {}

  absl::Status MakeBiases() {
    PC_ASSIGN_OR_RETURN(encoder_bias_,
                        MakeBias(config_, weights_.encoder_relative_bias,
                                 /*both_ways=*/true, *options_.device));
    PC_ASSIGN_OR_RETURN(decoder_bias_,
                        MakeBias(config_, weights_.decoder_relative_bias,
                                 /*both_ways=*/false, *options_.device));
    return absl::OkStatus();
  }

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;
  absl::Status EncoderOutput(std::span<const int32_t> tokens,
                             std::vector<float>* output) override;

  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return config_.vocab_size; }
  uint32_t context_length() const override { return config_.context_length; }
  const std::string& numerics() const override { return numerics_; }
  uint32_t num_threads() const override { return 1; }
  bool chooses_tokens() const override { return true; }
  std::optional<int32_t> decoder_start() const override {
    return config_.decoder_start_token;
  }

 private:
  // Rows of one stack in a pass, and where the device finds what it is told.
  struct Stack {
    struct Rows {
      const RowGroup* group = nullptr;
      uint32_t first = 0;
      size_t segment = 0;  // of the encoder
      uint32_t count() const {
        return static_cast<uint32_t>(group->tokens.size());
      }
    };
    std::vector<Rows> groups;
    std::vector<int32_t> ids;
    std::vector<gpu::KvSlot> slots;  // of its own keys and values
    size_t ids_at = 0;
    size_t slots_at = 0;

    int32_t num_rows() const { return static_cast<int32_t>(ids.size()); }
    void Clear() {
      groups.clear();
      ids.clear();
      slots.clear();
    }
  };

  KvLayout LayoutOf(uint32_t num_layers, uint32_t page_tokens) const {
    return {.num_layers = num_layers,
            .num_kv_heads = config_.num_kv_heads,
            .head_dim = config_.head_dim,
            .page_tokens = page_tokens};
  }
  void SortRows(std::span<const RowGroup> groups);
  absl::Status Prepare(bool cross_states);
  absl::Status ReserveEncoderPages();
  void DescribeEncoder(bool cross_states);
  void DescribeDecoder();
  absl::Status Run(std::vector<float>* logits);
  absl::Status RunDecoding(std::vector<float>* logits);
  PassGraphs::Key KeyOfDecoding() const;
  absl::Status RunEncoder();
  absl::Status WriteCrossStates();
  absl::Status RunDecoder();
  absl::Status AttendToSelf(const CudaLayer& layer, const Stack& stack,
                            const CudaAttention& attention,
                            const gpu::AttentionParams& params);
  absl::Status AttendToEncoder(uint32_t layer);
  gpu::AttentionParams ParamsOf(const KvLayout& layout, uint32_t layer) const;
  CudaLayers::SplitPlaces PlacesOf(const KvLayout& layout, uint32_t layer,
                                   size_t slots_at) const;

  const ModelConfig config_;
  const CudaBackendOptions options_;
  const KvLayout layout_;
  const KvLayout encoder_layout_;
  const std::string numerics_;
  const CudaWeights weights_;
  const std::unique_ptr<CudaLayers> layers_;
  gpu::DeviceBuffer encoder_bias_;
  gpu::DeviceBuffer decoder_bias_;

  // Of the pass that is running; kept for the next one's sake.
  PassInput input_;
  CudaAttention encoder_attention_;
  CudaAttention self_attention_;
  CudaAttention cross_attention_;
  CudaHead head_;
  CudaReadback readback_;
  Stack encoder_;
  Stack decoder_;
  std::vector<gpu::KvSlot> cross_slots_;
  size_t cross_slots_at_ = 0;
  std::vector<gpu::AttentionGroup> groups_;
  PassArrivals arrivals_;              // read by the attention to the encoder
  std::vector<KvView> segment_views_;  // of the encoder's groups
  gpu::DeviceBuffer encoder_kv_;       // pages of kEncoderPageTokens
  std::vector<std::byte*> encoder_pages_;

  PassGraphs graphs_;  // of passes without rows of the encoder
};

absl::Status CudaEncoderDecoder::Forward(std::span<const RowGroup> groups,
                                         std::vector<float>* logits) {
  PC_RETURN_IF_ERROR(CheckRowGroups(
      groups, {.layout = layout_,
               .vocab_size = config_.vocab_size,
               .max_distance = static_cast<int32_t>(config_.context_length) - 1,
               .encoder_decoder = true,
               .chooses_tokens = true}));
  SortRows(groups);
  logits->resize(static_cast<size_t>(head_.num_returned()) *
                 config_.vocab_size);
  if (encoder_.ids.empty() && decoder_.ids.empty()) return absl::OkStatus();
  PC_RETURN_IF_ERROR(options_.device->MakeCurrent());
  const absl::Status status = Run(logits);
  if (status.ok()) return status;
  // Nothing may run any more when the caller gives pages back.
  layers_->stream().Synchronize().IgnoreError();  // the first error is told
  return status;
}

absl::Status CudaEncoderDecoder::Run(std::vector<float>* logits) {
  PC_RETURN_IF_ERROR(Prepare(/*cross_states=*/true));
  if (options_.graphs && arrivals_.empty() && encoder_.ids.empty() &&
      decoder_.num_rows() <= PassGraphs::kMaxRows) {
    return RunDecoding(logits);
  }
  if (!encoder_.ids.empty()) {
    PC_RETURN_IF_ERROR(RunEncoder());
    PC_RETURN_IF_ERROR(WriteCrossStates());
  }
  if (!decoder_.ids.empty()) PC_RETURN_IF_ERROR(RunDecoder());
  return head_.RunAndRead(input_, logits->data());
}

absl::Status CudaEncoderDecoder::RunDecoding(std::vector<float>* logits) {
  const auto pass = [this] {
    PC_RETURN_IF_ERROR(RunDecoder());
    return head_.Run(input_);
  };
  PC_RETURN_IF_ERROR(graphs_.Run(KeyOfDecoding(), layers_->stream(), pass));
  return head_.Read(logits->data());
}

PassGraphs::Key CudaEncoderDecoder::KeyOfDecoding() const {
  PassGraphs::Key key = {static_cast<size_t>(decoder_.num_rows()),
                         static_cast<size_t>(head_.num_rows()),
                         static_cast<size_t>(head_.num_returned())};
  for (const CudaAttention* attention : {&self_attention_, &cross_attention_}) {
    const gpu::AttentionGrid& grid = attention->grid();
    key.insert(key.end(),
               {grid.large_items, grid.small_items, grid.merged_rows});
  }
  key.insert(key.end(), input_.layout().begin(), input_.layout().end());
  return key;
}

absl::Status CudaEncoderDecoder::EncoderOutput(std::span<const int32_t> tokens,
                                               std::vector<float>* output) {
  if (tokens.empty()) return absl::InvalidArgumentError("no tokens");
  PC_RETURN_IF_ERROR(CheckTokens(tokens, config_.vocab_size));
  const RowGroup group = {.tokens = tokens, .part = RowPart::kEncoder};
  SortRows({&group, 1});
  PC_RETURN_IF_ERROR(options_.device->MakeCurrent());
  PC_RETURN_IF_ERROR(Prepare(/*cross_states=*/false));
  PC_RETURN_IF_ERROR(RunEncoder());
  output->resize(config_.hidden_dim);
  const float* last =
      layers_->act().residual + (tokens.size() - 1) * config_.hidden_dim;
  return readback_.Read(last, config_.hidden_dim, layers_->stream(),
                        output->data());
}

void CudaEncoderDecoder::SortRows(std::span<const RowGroup> groups) {
  encoder_.Clear();
  decoder_.Clear();
  head_.Clear();
  arrivals_.Clear();
  size_t segment = 0;
  for (const RowGroup& group : groups) {
    const bool encoder = group.part != RowPart::kDecoder;
    if (group.part == RowPart::kEncoder) ++segment;
    if (group.tokens.empty()) continue;
    if (!encoder) arrivals_.Add(group.arrivals);
    Stack& stack = encoder ? encoder_ : decoder_;
    stack.groups.push_back(
        {&group, static_cast<uint32_t>(stack.ids.size()), segment});
    stack.ids.insert(stack.ids.end(), group.tokens.begin(), group.tokens.end());
    if (encoder) continue;
    const size_t end = stack.ids.size();
    for (size_t row = end - NumLogitRows(group); row < end; ++row) {
      head_.Add(static_cast<int32_t>(row), group.choice);
    }
  }
}

absl::Status CudaEncoderDecoder::ReserveEncoderPages() {
  const uint64_t needed = encoder_layout_.PagesFor(encoder_.ids.size());
  if (needed <= encoder_pages_.size()) return absl::OkStatus();
  const uint64_t num_pages = std::bit_ceil(needed);
  encoder_pages_.clear();
  encoder_kv_.Reset();
  PC_ASSIGN_OR_RETURN(
      encoder_kv_,
      options_.device->Allocate(num_pages * encoder_layout_.page_bytes()));
  for (uint64_t i = 0; i < num_pages; ++i) {
    encoder_pages_.push_back(encoder_kv_.data() +
                             i * encoder_layout_.page_bytes());
  }
  return absl::OkStatus();
}

absl::Status CudaEncoderDecoder::Prepare(bool cross_states) {
  PC_RETURN_IF_ERROR(ReserveEncoderPages());
  input_.Clear();
  DescribeEncoder(cross_states);
  DescribeDecoder();
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(input_.Reserve()));
  for (CudaAttention* attention :
       {&encoder_attention_, &self_attention_, &cross_attention_}) {
    PC_RETURN_IF_ERROR(graphs_.AfterReserve(attention->Reserve()));
  }
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(layers_->Reserve(
      std::max(encoder_.num_rows(), decoder_.num_rows()), head_.num_rows())));
  PC_RETURN_IF_ERROR(graphs_.AfterReserve(head_.Reserve()));
  return input_.Upload(layers_->stream());
}

// Every group of a segment sees all views of that segment, itself included.
void CudaEncoderDecoder::DescribeEncoder(bool cross_states) {
  groups_.clear();
  cross_slots_.clear();
  segment_views_.clear();
  for (const Stack::Rows& rows : encoder_.groups) {
    const RowGroup& group = *rows.group;
    segment_views_.push_back({.pages = encoder_pages_.data(),
                              .first_token = rows.first,
                              .num_tokens = rows.count(),
                              .local_position = group.position});
    AppendSlots(group, segment_views_.back(), encoder_pages_.data(),
                kEncoderPageTokens, &encoder_.slots);
    if (!cross_states) continue;
    AppendSlots(group, group.own, group.own_write_pages, layout_.page_tokens,
                &cross_slots_);
  }
  const auto& all = encoder_.groups;
  size_t begin = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].segment != all[begin].segment) begin = i;
    size_t end = i + 1;
    while (end < all.size() && all[end].segment == all[i].segment) ++end;
    groups_.push_back(
        {.first_row = all[i].first,
         .num_rows = all[i].count(),
         .position = all[i].group->position,
         .visible = std::span(segment_views_).subspan(begin, end - begin)});
  }
  encoder_.ids_at = input_.Add(encoder_.ids);
  encoder_.slots_at = input_.Add(encoder_.slots);
  cross_slots_at_ = input_.Add(cross_slots_);
  encoder_attention_.Plan(groups_, input_);
}

void CudaEncoderDecoder::DescribeDecoder() {
  groups_.clear();
  for (const Stack::Rows& rows : decoder_.groups) {
    const RowGroup& group = *rows.group;
    AppendSlots(group, group.own, group.own_write_pages, layout_.page_tokens,
                &decoder_.slots);
    groups_.push_back({.first_row = rows.first,
                       .num_rows = rows.count(),
                       .position = group.position,
                       .own = group.own});
  }
  decoder_.ids_at = input_.Add(decoder_.ids);
  decoder_.slots_at = input_.Add(decoder_.slots);
  head_.AddTo(input_);
  self_attention_.Plan(groups_, input_);
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i].visible = decoder_.groups[i].group->visible;
    groups_[i].own = {};
  }
  cross_attention_.Plan(groups_, input_);
}

gpu::AttentionParams CudaEncoderDecoder::ParamsOf(const KvLayout& layout,
                                                  uint32_t layer) const {
  const size_t query_dim = size_t{config_.num_heads} * config_.head_dim;
  return {.q = layers_->act().queries,
          .q_stride = query_dim,
          .out = layers_->act().attention,
          .out_stride = query_dim,
          .key_offset_bytes = layout.key_offset_bytes(layer),
          .value_offset_bytes = layout.value_offset_bytes(layer),
          .head_stride_bytes = layout.head_stride_bytes(),
          .scale = AttentionScale(config_),
          .bias_reach = static_cast<int32_t>(config_.relative_max_distance)};
}

CudaLayers::SplitPlaces CudaEncoderDecoder::PlacesOf(const KvLayout& layout,
                                                     uint32_t layer,
                                                     size_t slots_at) const {
  return {.slots = input_.At<gpu::KvSlot>(slots_at),
          .page_tokens = static_cast<int32_t>(layout.page_tokens),
          .key_offset_bytes = layout.key_offset_bytes(layer),
          .value_offset_bytes = layout.value_offset_bytes(layer)};
}

// residual += attention to the stack's own tokens.
absl::Status CudaEncoderDecoder::AttendToSelf(
    const CudaLayer& layer, const Stack& stack, const CudaAttention& attention,
    const gpu::AttentionParams& params) {
  const CudaActivations& act = layers_->act();
  PC_RETURN_IF_ERROR(
      layers_->Normalize(layer.attention_norm, stack.num_rows()));
  PC_RETURN_IF_ERROR(layers_->Multiply(act.normed, layer.qkv.weights,
                                       stack.num_rows(), act.qkv));
  const bool encoder = &stack == &encoder_;
  CudaLayers::SplitPlaces places =
      PlacesOf(encoder ? encoder_layout_ : layout_, 0, stack.slots_at);
  places.key_offset_bytes = params.key_offset_bytes;
  places.value_offset_bytes = params.value_offset_bytes;
  PC_RETURN_IF_ERROR(
      layers_->SplitQkv(nullptr, nullptr, nullptr, places, stack.num_rows()));
  PC_RETURN_IF_ERROR(attention.Launch(params, input_, layers_->stream()));
  return layers_->AddProduct(act.attention, layer.attention_out, {},
                             stack.num_rows());
}

// Leaves the encoder's output in residual, and as bf16 in normed.
absl::Status CudaEncoderDecoder::RunEncoder() {
  PC_RETURN_IF_ERROR(layers_->Embed(weights_,
                                    input_.At<int32_t>(encoder_.ids_at),
                                    nullptr, encoder_.num_rows()));
  gpu::AttentionParams params = ParamsOf(encoder_layout_, 0);
  params.distance_bias = reinterpret_cast<const float*>(encoder_bias_.data());
  for (const CudaLayer& layer : weights_.encoder_layers) {
    PC_RETURN_IF_ERROR(
        AttendToSelf(layer, encoder_, encoder_attention_, params));
    PC_RETURN_IF_ERROR(layers_->Normalize(layer.ffn_norm, encoder_.num_rows()));
    PC_RETURN_IF_ERROR(layers_->FeedForward(layer, encoder_.num_rows()));
  }
  return layers_->NormalizeResidual(weights_.encoder_output_norm,
                                    encoder_.num_rows());
}

// Keys and values of the encoder's output, for every layer of the decoder, to
// where each group's `own` says.
absl::Status CudaEncoderDecoder::WriteCrossStates() {
  const CudaActivations& act = layers_->act();
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    PC_RETURN_IF_ERROR(layers_->Multiply(
        act.normed, weights_.cross[i].key_value, encoder_.num_rows(), act.qkv));
    CudaLayers::SplitPlaces places = PlacesOf(layout_, i, cross_slots_at_);
    places.queries = false;
    PC_RETURN_IF_ERROR(layers_->SplitQkv(nullptr, nullptr, nullptr, places,
                                         encoder_.num_rows()));
  }
  return absl::OkStatus();
}

absl::Status CudaEncoderDecoder::RunDecoder() {
  PC_RETURN_IF_ERROR(layers_->Embed(weights_,
                                    input_.At<int32_t>(decoder_.ids_at),
                                    nullptr, decoder_.num_rows()));
  for (uint32_t i = 0; i < config_.num_layers; ++i) {
    const CudaLayer& layer = weights_.layers[i];
    gpu::AttentionParams params = ParamsOf(layout_, i);
    params.distance_bias = reinterpret_cast<const float*>(decoder_bias_.data());
    PC_RETURN_IF_ERROR(AttendToSelf(layer, decoder_, self_attention_, params));
    PC_RETURN_IF_ERROR(AttendToEncoder(i));
    PC_RETURN_IF_ERROR(layers_->Normalize(layer.ffn_norm, decoder_.num_rows()));
    PC_RETURN_IF_ERROR(layers_->FeedForward(layer, decoder_.num_rows()));
  }
  return absl::OkStatus();
}

absl::Status CudaEncoderDecoder::AttendToEncoder(uint32_t layer) {
  const CudaCross& cross = weights_.cross[layer];
  const CudaActivations& act = layers_->act();
  const int32_t num_rows = decoder_.num_rows();
  PC_RETURN_IF_ERROR(layers_->Normalize(cross.norm, num_rows));
  PC_RETURN_IF_ERROR(
      layers_->Multiply(act.normed, cross.query, num_rows, act.qkv));
  PC_RETURN_IF_ERROR(layers_->SplitQkv(nullptr, nullptr, nullptr,
                                       {.states = false}, num_rows));
  arrivals_.AwaitLayers(layer + 1);
  PC_RETURN_IF_ERROR(cross_attention_.Launch(ParamsOf(layout_, layer), input_,
                                             layers_->stream()));
  return layers_->AddProduct(act.attention, {.weights = cross.out}, {},
                             num_rows);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaEncoderDecoder(
    const ModelConfig& config, const CudaBackendOptions& options,
    std::unique_ptr<CudaLayers> layers, CudaWeights weights) {
  auto backend = std::make_unique<CudaEncoderDecoder>(
      config, options, std::move(layers), std::move(weights));
  PC_RETURN_IF_ERROR(backend->MakeBiases());
  return backend;
}

}  // namespace promptcache::worker
