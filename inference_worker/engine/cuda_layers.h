#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/matmul.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/split_qkv.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/cuda_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Activations of one pass in device memory, rows dense, a matrix product's
// padding rows included. Matrix products read bf16 and give fp32.
struct CudaActivations {
  float* residual = nullptr;      // [rows][hidden]
  float* qkv = nullptr;           // [rows][q + k + v]
  float* gate_up = nullptr;       // [rows][2 * ffn]
  float* product = nullptr;       // [rows][hidden], before a norm after it
  float* logits = nullptr;        // [logit rows][vocab]
  uint16_t* normed = nullptr;     // bf16 [rows][hidden]
  uint16_t* queries = nullptr;    // bf16 [rows][q], not rotated
  uint16_t* attention = nullptr;  // bf16 [rows][q]
  uint16_t* gated = nullptr;      // bf16 [rows][ffn]
};

// What every kind of layer is made of, on one device and stream: the
// operations of a transformer over the rows of a pass, in `act()`. Nothing here
// waits for the device. Errors name the kernel or the call.
//
// Thread-compatible. Must not outlive the device nor the weights.
class CudaLayers {
 public:
  // Rows whose logits are computed at once.
  static constexpr int32_t kLogitRows = 256;

  static absl::StatusOr<std::unique_ptr<CudaLayers>> Create(
      gpu::Device& device, const ModelConfig& config,
      const gpu::Matmul::Options& matmul);

  gpu::Device& device() { return device_; }
  gpu::Stream& stream() { return *stream_; }
  const CudaActivations& act() const { return act_; }

  // Room for so many rows, and for the logits of at most kLogitRows of them.
  // What was there is lost when it has to grow; then true.
  absl::StatusOr<bool> Reserve(int32_t num_rows, int32_t num_logit_rows);

  // residual = embeddings of `ids`, scaled, plus those of `position_rows`
  // where the model has learned positions.
  absl::Status Embed(const CudaWeights& weights, const int32_t* ids,
                     const int32_t* position_rows, int32_t num_rows);

  // normed = norm of the residual. Row i is of row index[i], or of row i.
  absl::Status Normalize(const CudaNorm& norm, int32_t num_rows,
                         const int32_t* row_index = nullptr);
  // residual = norm of the residual, and normed the same as bf16.
  absl::Status NormalizeResidual(const CudaNorm& norm, int32_t num_rows);

  // out = x W^T, without a bias.
  absl::Status Multiply(const uint16_t* x, const CudaMatrix& weights,
                        int32_t num_rows, float* out);
  // residual += x W^T + bias, normed before it is added where there is such a
  // norm.
  absl::Status AddProduct(const uint16_t* x, const CudaProjection& projection,
                          const CudaNorm& post_norm, int32_t num_rows);

  // Keys and values in `qkv` to where `slots` say, queries to act().queries.
  struct SplitPlaces {
    const gpu::KvSlot* slots = nullptr;
    int32_t page_tokens = 0;
    uint64_t key_offset_bytes = 0;
    uint64_t value_offset_bytes = 0;
    gpu::RopeView rope;
    bool queries = true;  // qkv holds queries, too
    bool states = true;   // and keys and values
  };
  absl::Status SplitQkv(const float* bias, const float* query_norm,
                        const float* key_norm, const SplitPlaces& places,
                        int32_t num_rows);

  // residual += the feed-forward block of what is in `normed`.
  absl::Status FeedForward(const CudaLayer& layer, int32_t num_rows);

  // Logits of the rows of `normed`.
  absl::Status ProjectToVocabulary(const CudaWeights& weights,
                                   int32_t num_rows);

 private:
  CudaLayers(gpu::Device& device, const ModelConfig& config);
  absl::Status Norm(gpu::NormParams params, const CudaNorm& norm,
                    int32_t num_rows);
  absl::Status AddBias(const float* bias, float* x, int32_t dim,
                       int32_t num_rows);
  int32_t query_dim() const {
    return static_cast<int32_t>(config_.num_heads * config_.head_dim);
  }
  int32_t kv_dim() const {
    return static_cast<int32_t>(config_.num_kv_heads * config_.head_dim);
  }
  int32_t hidden_dim() const {
    return static_cast<int32_t>(config_.hidden_dim);
  }
  int32_t ffn_dim() const { return static_cast<int32_t>(config_.ffn_dim); }
  int32_t gate_up_dim() const {
    return config_.gated_ffn ? 2 * ffn_dim() : ffn_dim();
  }

  gpu::Device& device_;
  const ModelConfig config_;
  const gpu::ActivationKind activation_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<gpu::Matmul> matmul_;
  gpu::DeviceBuffer memory_;
  int32_t capacity_rows_ = 0;
  int32_t capacity_logit_rows_ = 0;
  CudaActivations act_;
};

}  // namespace promptcache::worker
