#include "inference_worker/engine/cuda_layers.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "cuda/kernels/add_bias.h"
#include "cuda/kernels/embedding.h"
#include "cuda/runtime/cuda_status.h"

namespace promptcache::worker {
namespace {

// Of each buffer, in bytes: what matrix products and allocations are aligned
// to.
constexpr size_t kAlignment = 256;

gpu::ActivationKind KindOf(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return gpu::ActivationKind::kSilu;
    case Activation::kGelu:
      return gpu::ActivationKind::kGelu;
    case Activation::kGeluTanh:
      return gpu::ActivationKind::kGeluTanh;
    case Activation::kRelu:
      return gpu::ActivationKind::kRelu;
  }
  return gpu::ActivationKind::kSilu;
}

// Hands out pieces of one allocation; first without, to count.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  void Take(int32_t rows, int32_t width, T** to) {
    *to = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const size_t bytes =
        static_cast<size_t>(rows) * static_cast<size_t>(width) * sizeof(T);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t used() const { return used_; }

 private:
  std::byte* const base_;
  size_t used_ = 0;
};

}  // namespace

CudaLayers::CudaLayers(gpu::Device& device, const ModelConfig& config)
    : device_(device),
      config_(config),
      activation_(KindOf(config.activation)) {}

absl::StatusOr<std::unique_ptr<CudaLayers>> CudaLayers::Create(
    gpu::Device& device, const ModelConfig& config,
    const gpu::Matmul::Options& matmul) {
  std::unique_ptr<CudaLayers> layers(new CudaLayers(device, config));
  PC_ASSIGN_OR_RETURN(layers->stream_,
                      device.NewStream(gpu::StreamPriority::kHigh));
  PC_ASSIGN_OR_RETURN(layers->matmul_, gpu::Matmul::Create(device, matmul));
  return layers;
}

absl::StatusOr<bool> CudaLayers::Reserve(int32_t num_rows,
                                         int32_t num_logit_rows) {
  const int32_t logit_rows = std::min(num_logit_rows, kLogitRows);
  if (num_rows <= capacity_rows_ && logit_rows <= capacity_logit_rows_) {
    return false;
  }
  const int32_t rows = std::max(num_rows, capacity_rows_);
  const int32_t logits = std::max(logit_rows, capacity_logit_rows_);
  const int32_t padded = matmul_->PaddedRows(rows);
  const auto carve = [&](Carver carver) {
    carver.Take(padded, hidden_dim(), &act_.residual);
    carver.Take(padded, query_dim() + 2 * kv_dim(), &act_.qkv);
    carver.Take(padded, gate_up_dim(), &act_.gate_up);
    carver.Take(padded, config_.post_norms ? hidden_dim() : 0, &act_.product);
    carver.Take(matmul_->PaddedRows(logits),
                static_cast<int32_t>(config_.vocab_size), &act_.logits);
    // The rows that want logits are gathered here, too.
    carver.Take(std::max(padded, matmul_->PaddedRows(logits)), hidden_dim(),
                &act_.normed);
    carver.Take(padded, query_dim(), &act_.queries);
    carver.Take(padded, query_dim(), &act_.attention);
    carver.Take(padded, ffn_dim(), &act_.gated);
    return carver.used();
  };
  PC_RETURN_IF_ERROR(stream_->Synchronize());
  memory_.Reset();
  capacity_rows_ = 0;
  capacity_logit_rows_ = 0;
  PC_ASSIGN_OR_RETURN(memory_, device_.Allocate(carve(Carver(nullptr))));
  carve(Carver(memory_.data()));
  capacity_rows_ = rows;
  capacity_logit_rows_ = logits;
  return true;
}

absl::Status CudaLayers::Embed(const CudaWeights& weights, const int32_t* ids,
                               const int32_t* position_rows, int32_t num_rows) {
  return gpu::ToStatus(
      gpu::LaunchEmbedding({.table = weights.embedding.data(),
                            .ids = ids,
                            .scale = config_.embedding_scale,
                            .positions = weights.positions.data(),
                            .position_rows = position_rows,
                            .out = act_.residual,
                            .num_rows = num_rows,
                            .dim = hidden_dim()},
                           stream_->native()),
      "LaunchEmbedding");
}

absl::Status CudaLayers::Norm(gpu::NormParams params, const CudaNorm& norm,
                              int32_t num_rows) {
  params.weight = norm.weight;
  params.bias = norm.bias;
  params.layer_norm = config_.norm == NormKind::kLayer;
  params.epsilon = config_.norm_epsilon;
  params.num_rows = num_rows;
  params.dim = hidden_dim();
  return gpu::ToStatus(gpu::LaunchNorm(params, stream_->native()),
                       "LaunchNorm");
}

absl::Status CudaLayers::Normalize(const CudaNorm& norm, int32_t num_rows,
                                   const int32_t* row_index) {
  return Norm(
      {.x = act_.residual, .row_index = row_index, .out_bf16 = act_.normed},
      norm, num_rows);
}

absl::Status CudaLayers::NormalizeResidual(const CudaNorm& norm,
                                           int32_t num_rows) {
  return Norm(
      {.x = act_.residual, .out_bf16 = act_.normed, .out = act_.residual}, norm,
      num_rows);
}

absl::Status CudaLayers::Multiply(const uint16_t* x, const CudaMatrix& weights,
                                  int32_t num_rows, float* out) {
  return matmul_->Run({.x = x,
                       .weights = weights.data(),
                       .y = out,
                       .num_rows = num_rows,
                       .num_cols = static_cast<int32_t>(weights.num_rows()),
                       .depth = static_cast<int32_t>(weights.num_cols())},
                      stream_->native());
}

absl::Status CudaLayers::AddBias(const float* bias, float* x, int32_t dim,
                                 int32_t num_rows) {
  if (bias == nullptr) return absl::OkStatus();
  return gpu::ToStatus(
      gpu::LaunchAddBias(
          {.x = x, .bias = bias, .num_rows = num_rows, .dim = dim},
          stream_->native()),
      "LaunchAddBias");
}

absl::Status CudaLayers::AddProduct(const uint16_t* x,
                                    const CudaProjection& projection,
                                    const CudaNorm& post_norm,
                                    int32_t num_rows) {
  const CudaMatrix& weights = projection.weights;
  const bool normed_after = post_norm.weight != nullptr;
  float* out = normed_after ? act_.product : act_.residual;
  PC_RETURN_IF_ERROR(
      matmul_->Run({.x = x,
                    .weights = weights.data(),
                    .y = out,
                    .num_rows = num_rows,
                    .num_cols = static_cast<int32_t>(weights.num_rows()),
                    .depth = static_cast<int32_t>(weights.num_cols()),
                    .accumulate = !normed_after},
                   stream_->native()));
  PC_RETURN_IF_ERROR(AddBias(projection.bias, out, hidden_dim(), num_rows));
  if (!normed_after) return absl::OkStatus();
  return Norm({.x = act_.product, .add_to = act_.residual}, post_norm,
              num_rows);
}

absl::Status CudaLayers::SplitQkv(const float* bias, const float* query_norm,
                                  const float* key_norm,
                                  const SplitPlaces& places, int32_t num_rows) {
  const int32_t stride =
      (places.queries ? query_dim() : 0) + (places.states ? 2 * kv_dim() : 0);
  return gpu::ToStatus(
      gpu::LaunchSplitQkv(
          {.qkv = act_.qkv,
           .bias = bias,
           .num_rows = num_rows,
           .stride = stride,
           .num_heads =
               places.queries ? static_cast<int32_t>(config_.num_heads) : 0,
           .num_kv_heads =
               places.states ? static_cast<int32_t>(config_.num_kv_heads) : 0,
           .head_dim = static_cast<int32_t>(config_.head_dim),
           .query_norm = query_norm,
           .key_norm = key_norm,
           .epsilon = config_.norm_epsilon,
           .queries = act_.queries,
           .rope = places.rope,
           .slots = places.slots,
           .page_tokens = places.page_tokens,
           .key_offset_bytes = places.key_offset_bytes,
           .value_offset_bytes = places.value_offset_bytes},
          stream_->native()),
      "LaunchSplitQkv");
}

absl::Status CudaLayers::FeedForward(const CudaLayer& layer, int32_t num_rows) {
  PC_RETURN_IF_ERROR(
      Multiply(act_.normed, layer.gate_up.weights, num_rows, act_.gate_up));
  PC_RETURN_IF_ERROR(
      gpu::ToStatus(gpu::LaunchActivation({.x = act_.gate_up,
                                           .bias = layer.gate_up.bias,
                                           .out = act_.gated,
                                           .num_rows = num_rows,
                                           .dim = ffn_dim(),
                                           .in_stride = gate_up_dim(),
                                           .gated = config_.gated_ffn,
                                           .kind = activation_},
                                          stream_->native()),
                    "LaunchActivation"));
  return AddProduct(act_.gated, layer.down, layer.post_ffn_norm, num_rows);
}

absl::Status CudaLayers::ProjectToVocabulary(const CudaWeights& weights,
                                             int32_t num_rows) {
  PC_RETURN_IF_ERROR(
      Multiply(act_.normed, weights.head, num_rows, act_.logits));
  return AddBias(weights.output_bias, act_.logits,
                 static_cast<int32_t>(config_.vocab_size), num_rows);
}

}  // namespace promptcache::worker
