#include "inference_worker/engine/cpu_backend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_weights.h"
#include "inference_worker/engine/families/family.h"
#include "inference_worker/engine/row_groups.h"

namespace promptcache::worker {
namespace {

// Rows that go through a layer's matrices together: enough to reuse a weight
// panel well, few enough for their activations to stay in the cache; whole
// blocks of every set of kernels (48, 96 and 128 rows).
constexpr size_t kBlockRows = 384;

constexpr uint32_t kMaxHeadDim = 256;

// Activations of one pass, reused by the next. Rows are dense.
struct Activations {
  size_t capacity_rows = 0;
  cpu::PopulatedMemory memory;
  // Of all rows.
  float* residual = nullptr;   // [rows][hidden]
  float* qkv = nullptr;        // [rows][q + k + v]
  float* attention = nullptr;  // [rows][q]
  // Of one block of rows.
  float* normed = nullptr;   // [block][hidden]
  float* gate_up = nullptr;  // [block][2 * ffn]
  float* gated = nullptr;    // [block][ffn]
};

absl::Status CheckConfig(const ModelConfig& c) {
  if (c.num_layers == 0 || c.num_heads == 0 || c.num_kv_heads == 0 ||
      c.hidden_dim == 0 || c.ffn_dim == 0 || c.vocab_size == 0 ||
      c.context_length == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model with a dimension of 0: layers ", c.num_layers, ", heads ",
        c.num_heads, ", kv heads ", c.num_kv_heads, ", hidden ", c.hidden_dim,
        ", ffn ", c.ffn_dim, ", vocabulary ", c.vocab_size, ", context ",
        c.context_length));
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(c.num_heads, " heads do not divide into ", c.num_kv_heads,
                     " kv heads"));
  }
  if (c.head_dim == 0 || c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim ", c.head_dim,
                     " must be a multiple of 16, at most ", kMaxHeadDim));
  }
  if (c.rope.dims == 0 || c.rope.dims % 2 != 0 || c.rope.dims > c.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RoPE over ", c.rope.dims, " elements of a head of ", c.head_dim));
  }
  return absl::OkStatus();
}

absl::StatusOr<cpu::RopeTable> MakeRopeTable(const ModelConfig& config) {
  return cpu::RopeTable::Create({
      .inv_freq = cpu::RopeTable::PlainFrequencies(
          static_cast<double>(config.rope.theta), config.rope.dims),
      .pairing = config.rope.pairing == RopePairing::kInterleaved
                     ? cpu::Pairing::kInterleaved
                     : cpu::Pairing::kHalfSplit,
      .max_position = static_cast<int32_t>(config.context_length) - 1,
  });
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const ModelConfig& config, uint32_t page_tokens,
             std::unique_ptr<cpu::Kernels> kernels, cpu::RopeTable rope,
             CpuWeights weights)
      : config_(config),
        layout_{.num_layers = config.num_layers,
                .num_kv_heads = config.num_kv_heads,
                .head_dim = config.head_dim,
                .page_tokens = page_tokens},
        numerics_(absl::StrCat("exact/", kernels->name())),
        kernels_(std::move(kernels)),
        rope_(std::move(rope)),
        weights_(std::move(weights)) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;

  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return config_.vocab_size; }
  uint32_t context_length() const override { return config_.context_length; }
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

  absl::Status ReserveRows(size_t num_rows);
  void DescribePass(std::span<const RowGroup> groups);
  void RunLayer(uint32_t index, size_t num_rows);
  void RunFeedForward(const CpuLayerWeights& layer, float* residual,
                      size_t num_rows);
  void RunHead(std::span<const RowGroup> groups, float* logits);
  void ProjectToVocabulary(size_t num_rows, float* logits);

  const ModelConfig config_;
  const KvLayout layout_;
  const std::string numerics_;
  const std::unique_ptr<cpu::Kernels> kernels_;
  const cpu::RopeTable rope_;
  const CpuWeights weights_;

  // Of the pass that is running; kept for the next one's sake.
  Activations act_;
  std::vector<int32_t> ids_;
  std::vector<cpu::KvWrite> writes_;
  std::vector<cpu::AttentionGroup> attention_;
};

absl::Status CpuBackend::Forward(std::span<const RowGroup> groups,
                                 std::vector<float>* logits) {
  const PassLimits limits = {
      .layout = layout_,
      .vocab_size = config_.vocab_size,
      .max_distance = rope_.max_position(),
  };
  PC_RETURN_IF_ERROR(CheckRowGroups(groups, limits));
  size_t num_rows = 0;
  size_t num_logit_rows = 0;
  for (const RowGroup& group : groups) {
    num_rows += group.tokens.size();
    num_logit_rows += NumLogitRows(group);
  }
  PC_RETURN_IF_ERROR(ReserveRows(num_rows));
  logits->resize(num_logit_rows * config_.vocab_size);
  if (num_rows == 0) return absl::OkStatus();

  DescribePass(groups);
  kernels_->LookUp(weights_.embedding, ids_, act_.residual, hidden_dim());
  for (uint32_t i = 0; i < config_.num_layers; ++i) RunLayer(i, num_rows);
  RunHead(groups, logits->data());
  return absl::OkStatus();
}

// Grows by doubling: a server's passes settle at its largest one.
absl::Status CpuBackend::ReserveRows(size_t num_rows) {
  if (num_rows <= act_.capacity_rows) return absl::OkStatus();
  const size_t capacity = std::bit_ceil(std::max<size_t>(num_rows, 16));
  const size_t block = std::min(capacity, kBlockRows);
  const std::pair<float**, size_t> parts[] = {
      {&act_.residual, capacity * hidden_dim()},
      {&act_.qkv, capacity * qkv_dim()},
      {&act_.attention, capacity * query_dim()},
      {&act_.normed, block * hidden_dim()},
      {&act_.gate_up, block * 2 * ffn_dim()},
      {&act_.gated, block * ffn_dim()},
  };
  constexpr size_t kAlignFloats = 16;
  const auto aligned = [](size_t count) {
    return (count + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
  };
  size_t total = 0;
  for (const auto& [pointer, count] : parts) total += aligned(count);
  act_ = {};  // the old ones go first: never both at once
  PC_ASSIGN_OR_RETURN(act_.memory,
                      cpu::PopulatedMemory::Allocate(total * sizeof(float)));
  auto* next = reinterpret_cast<float*>(act_.memory.data());
  for (const auto& [pointer, count] : parts) {
    *pointer = next;
    next += aligned(count);
  }
  act_.capacity_rows = capacity;
  return absl::OkStatus();
}

// Rows of all groups lie one after the other; the kernels' views of them are
// the same in every layer.
void CpuBackend::DescribePass(std::span<const RowGroup> groups) {
  ids_.clear();
  writes_.clear();
  attention_.clear();
  for (const RowGroup& group : groups) {
    if (group.tokens.empty()) continue;
    const size_t first = ids_.size();
    const auto num_rows = static_cast<uint32_t>(group.tokens.size());
    ids_.insert(ids_.end(), group.tokens.begin(), group.tokens.end());
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
                          .own = group.own});
  }
}

void CpuBackend::RunLayer(uint32_t index, size_t num_rows) {
  const CpuLayerWeights& layer = weights_.layers[index];
  for (size_t row = 0; row < num_rows; row += kBlockRows) {
    const size_t rows = std::min(kBlockRows, num_rows - row);
    kernels_->RmsNorm(act_.residual + row * hidden_dim(),
                      layer.attention_norm.data(), config_.norm_epsilon, rows,
                      hidden_dim(), act_.normed);
    kernels_->Gemm(act_.normed, hidden_dim(), rows, layer.qkv,
                   act_.qkv + row * qkv_dim(), qkv_dim());
  }
  // All of the pass's keys and values before any attention: a group may see
  // what another one writes.
  const cpu::AttentionShape shape = {
      .num_heads = config_.num_heads,
      .layer = index,
      .layout = layout_,
      .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim)),
      .rope = &rope_,
  };
  kernels_->WriteKv(shape, writes_);
  kernels_->Attend(shape, attention_);
  for (size_t row = 0; row < num_rows; row += kBlockRows) {
    const size_t rows = std::min(kBlockRows, num_rows - row);
    float* residual = act_.residual + row * hidden_dim();
    kernels_->Gemm(act_.attention + row * query_dim(), query_dim(), rows,
                   layer.attention_out, residual, hidden_dim(),
                   {.residual = residual});
    RunFeedForward(layer, residual, rows);
  }
}

void CpuBackend::RunFeedForward(const CpuLayerWeights& layer, float* residual,
                                size_t num_rows) {
  kernels_->RmsNorm(residual, layer.ffn_norm.data(), config_.norm_epsilon,
                    num_rows, hidden_dim(), act_.normed);
  kernels_->Gemm(act_.normed, hidden_dim(), num_rows, layer.gate_up,
                 act_.gate_up, 2 * ffn_dim());
  kernels_->SwiGlu(act_.gate_up, act_.gate_up + ffn_dim(), 2 * ffn_dim(),
                   num_rows, ffn_dim(), act_.gated);
  kernels_->Gemm(act_.gated, ffn_dim(), num_rows, layer.down, residual,
                 hidden_dim(), {.residual = residual});
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
  kernels_->RmsNorm(act_.normed, weights_.output_norm.data(),
                    config_.norm_epsilon, num_rows, hidden_dim(), act_.normed);
  kernels_->Gemm(act_.normed, hidden_dim(), num_rows, weights_.head(), logits,
                 config_.vocab_size);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(
    const ModelFile& file, const CpuBackendOptions& options) {
  const ModelConfig& config = file.config();
  // The only family so far has the only kinds there are.
  PC_RETURN_IF_ERROR(FamilyOf(config).status());
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
  PC_ASSIGN_OR_RETURN(cpu::RopeTable rope, MakeRopeTable(config));
  PC_ASSIGN_OR_RETURN(CpuWeights weights,
                      LoadCpuWeights(file, *kernels, options.progress));
  return std::make_unique<CpuBackend>(config, options.page_tokens,
                                      std::move(kernels), std::move(rope),
                                      std::move(weights));
}

}  // namespace promptcache::worker
