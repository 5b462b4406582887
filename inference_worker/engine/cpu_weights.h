#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_matrix.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// A vector's elements in fp32; null when the model has none.
inline const float* DataOrNull(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

struct CpuNorm {
  std::vector<float> weight;  // empty: there is no such norm
  std::vector<float> bias;    // empty: none
};

struct CpuProjection {
  CpuMatrix weights;
  std::vector<float> bias;  // empty: none
};

struct CpuLayerWeights {
  CpuNorm attention_norm;         // [hidden]
  CpuProjection qkv;              // [q + k + v, hidden]
  std::vector<float> query_norm;  // [head_dim], or empty
  std::vector<float> key_norm;    // likewise
  CpuProjection attention_out;    // [hidden, q]
  CpuNorm post_attention_norm;    // [hidden], or none
  CpuNorm ffn_norm;               // [hidden]; a shared one twice
  CpuProjection gate_up;          // [2 * ffn, hidden]: gate, then up; or up
  CpuProjection down;             // [hidden, ffn]
  CpuNorm post_ffn_norm;          // [hidden], or none
};

// Of an encoder-decoder: the decoder's attention to the encoder's output.
struct CpuCrossWeights {
  CpuNorm norm;             // [hidden]
  CpuProjection query;      // [q, hidden]
  CpuProjection key_value;  // [k + v, hidden], of the encoder's output
  CpuProjection out;        // [hidden, q]
};

struct CpuEncoderWeights {
  std::vector<CpuLayerWeights> layers;
  CpuNorm output_norm;
  std::vector<float> relative_bias;  // [bucket][head]
  // The decoder's, beside CpuWeights::layers.
  std::vector<CpuCrossWeights> cross;
  std::vector<float> decoder_relative_bias;
};

// A model's weights packed for one set of kernels; norms and biases in fp32.
struct CpuWeights {
  CpuMatrix embedding;  // [vocab, hidden]
  CpuMatrix positions;  // [table, hidden]; empty unless learned
  CpuMatrix output;     // [vocab, hidden]; empty when tied
  std::vector<float> output_bias;
  CpuNorm output_norm;
  std::vector<CpuLayerWeights> layers;
  CpuEncoderWeights encoder;  // empty without one
  bool quantized = false;     // any matrix stays so

  const CpuMatrix& head() const {
    return output.num_rows() > 0 ? output : embedding;
  }
};

// Packs everything on all threads of `kernels`: with `fast` the matrices that
// can be stay quantised, the others are rounded to bf16. `progress` (may be
// empty) is called on this thread with 0..1. InvalidArgument names a tensor
// whose shape is not what the config says.
absl::StatusOr<CpuWeights> LoadCpuWeights(
    const ModelFile& file, bool fast, cpu::Kernels& kernels,
    const std::function<void(double)>& progress);

}  // namespace promptcache::worker
