#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// The oracle for encoder-decoders: T5 in double precision, written to be read,
// with the weights as the file has them. Shares no code with the engine.
// Immutable.
class ReferenceT5 {
 public:
  using Rows = std::vector<std::vector<double>>;

  static absl::StatusOr<std::unique_ptr<ReferenceT5>> Create(
      const ModelFile& file);

  // The encoder's output [token][hidden] of one segment.
  Rows Encode(std::span<const int32_t> ids,
              std::span<const int32_t> positions) const;
  // At positions 0, 1, ...
  Rows Encode(std::span<const int32_t> ids) const;

  // Logits [token][vocab] of a decoder that sees all of `memory`.
  Rows Decode(const Rows& memory, std::span<const int32_t> ids) const;

 private:
  struct Matrix {
    size_t rows = 0;
    size_t cols = 0;
    std::vector<float> values;
    double at(size_t row, size_t col) const { return values[row * cols + col]; }
  };
  struct Attention {
    Matrix norm, query, key, value, out;
  };
  struct FeedForward {
    Matrix norm, gate, up, down;  // gate: empty when there is none
  };
  struct Layer {
    Attention self, cross;  // cross: the decoder's only
    FeedForward ffn;
  };
  struct Bias {
    const Matrix* table = nullptr;  // null: none
    std::span<const int32_t> positions;
    bool both_ways = false;
  };

  explicit ReferenceT5(const ModelConfig& config) : config_(config) {}

  Rows Embed(std::span<const int32_t> ids) const;
  std::vector<double> Norm(const Matrix& weight,
                           const std::vector<double>& x) const;
  // x += what attention of the normed rows over `memory` (null: over
  // themselves) gives.
  void Attend(const Attention& weights, const Rows* memory, const Bias& bias,
              Rows& x) const;
  void Feed(const FeedForward& weights, Rows& x) const;

  const ModelConfig config_;
  Matrix embedding_, output_, output_norm_, encoder_norm_;
  Matrix bias_, encoder_bias_;
  std::vector<Layer> encoder_, decoder_;
};

}  // namespace promptcache::worker
