#pragma once

#include <vector>

namespace promptcache::worker {

// A model's weights, whatever a device makes of a matrix (`Matrix`); norms and
// biases in fp32 on the host. What a model does not have is empty.

// A vector's elements; null when the model has none.
inline const float* DataOrNull(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

struct NormWeights {
  std::vector<float> weight;  // empty: there is no such norm
  std::vector<float> bias;    // empty: none
};

template <typename Matrix>
struct Projection {
  Matrix weights;
  std::vector<float> bias;  // empty: none
};

template <typename Matrix>
struct LayerWeights {
  NormWeights attention_norm;        // [hidden]
  Projection<Matrix> qkv;            // [q + k + v, hidden]
  std::vector<float> query_norm;     // [head_dim], or empty
  std::vector<float> key_norm;       // likewise
  Projection<Matrix> attention_out;  // [hidden, q]
  NormWeights post_attention_norm;   // [hidden], or none
  NormWeights ffn_norm;              // [hidden]; a shared one twice
  Projection<Matrix> gate_up;        // [2 * ffn, hidden]: gate, then up; or up
  Projection<Matrix> down;           // [hidden, ffn]
  NormWeights post_ffn_norm;         // [hidden], or none
};

// Of an encoder-decoder: the decoder's attention to the encoder's output.
template <typename Matrix>
struct CrossWeights {
  NormWeights norm;              // [hidden]
  Projection<Matrix> query;      // [q, hidden]
  Projection<Matrix> key_value;  // [k + v, hidden], of the encoder's output
  Projection<Matrix> out;        // [hidden, q]
};

template <typename Matrix>
struct EncoderWeights {
  std::vector<LayerWeights<Matrix>> layers;
  NormWeights output_norm;
  std::vector<float> relative_bias;  // [bucket][head]
  // The decoder's, beside ModelWeights::layers.
  std::vector<CrossWeights<Matrix>> cross;
  std::vector<float> decoder_relative_bias;
};

template <typename Matrix>
struct ModelWeights {
  Matrix embedding;  // [vocab, hidden]
  Matrix positions;  // [table, hidden]; empty unless learned
  Matrix output;     // [vocab, hidden]; empty when tied
  std::vector<float> output_bias;
  NormWeights output_norm;
  std::vector<LayerWeights<Matrix>> layers;
  EncoderWeights<Matrix> encoder;  // empty without one

  const Matrix& head() const {
    return output.num_rows() > 0 ? output : embedding;
  }
};

}  // namespace promptcache::worker
