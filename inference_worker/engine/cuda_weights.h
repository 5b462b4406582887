#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/model_weights.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// bf16 [num_rows][num_cols] in device memory, aligned to 256 bytes.
class CudaMatrix {
 public:
  CudaMatrix() = default;
  CudaMatrix(const uint16_t* data, uint32_t num_rows, uint32_t num_cols)
      : data_(data), num_rows_(num_rows), num_cols_(num_cols) {}

  const uint16_t* data() const { return data_; }  // null: there is none
  uint32_t num_rows() const { return num_rows_; }
  uint32_t num_cols() const { return num_cols_; }

 private:
  const uint16_t* data_ = nullptr;
  uint32_t num_rows_ = 0;
  uint32_t num_cols_ = 0;
};

// The same of the vectors, fp32 in device memory; null: there is none.
struct CudaNorm {
  const float* weight = nullptr;
  const float* bias = nullptr;
};
struct CudaProjection {
  CudaMatrix weights;
  const float* bias = nullptr;
};
struct CudaLayer {
  CudaNorm attention_norm;
  CudaProjection qkv;
  const float* query_norm = nullptr;
  const float* key_norm = nullptr;
  CudaProjection attention_out;
  CudaNorm post_attention_norm;
  CudaNorm ffn_norm;
  CudaProjection gate_up;
  CudaProjection down;
  CudaNorm post_ffn_norm;
};
struct CudaCross {
  CudaNorm norm;
  CudaMatrix query;
  CudaMatrix key_value;
  CudaMatrix out;
};

// A model's weights on a device. Must not outlive it.
struct CudaWeights {
  std::vector<gpu::DeviceBuffer> memory;  // what everything below points to
  CudaMatrix embedding;
  CudaMatrix positions;
  CudaMatrix head;
  const float* output_bias = nullptr;
  CudaNorm output_norm;
  std::vector<CudaLayer> layers;
  // Of an encoder-decoder; the tables on the host, [bucket][head].
  std::vector<CudaLayer> encoder_layers;
  CudaNorm encoder_output_norm;
  std::vector<CudaCross> cross;
  std::vector<float> encoder_relative_bias;
  std::vector<float> decoder_relative_bias;
};

// Rounds every matrix to bf16 and copies all to `device`. `progress` (may be
// empty) is called on this thread with 0..1. InvalidArgument names a tensor
// whose shape is not what the config says; ResourceExhausted says what the
// device has.
absl::StatusOr<CudaWeights> LoadCudaWeights(
    const ModelFile& file, gpu::Device& device,
    const std::function<void(double)>& progress);

}  // namespace promptcache::worker
