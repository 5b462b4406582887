#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// The oracle: a llama forward in double precision, written to be read and not
// to be fast, that shares no code with the engine but a file's dequantised
// weights. Visibility and positions are given token by token, so that it says
// what a plan means and not what caching makes of it. Immutable.
class ReferenceModel {
 public:
  enum class Weights {
    kAsStored,
    kBf16,  // matrices rounded to bf16, as the engine holds them
  };
  static absl::StatusOr<std::unique_ptr<ReferenceModel>> Create(
      const ModelFile& file, Weights weights = Weights::kBf16);

  struct Token {
    int32_t id = 0;
    int32_t position = 0;
  };

  // Keys and values of tokens. Keys are kept unrotated: where they stand is
  // said where they are seen.
  struct States {
    std::vector<int32_t> positions;           // as they were computed
    std::vector<std::vector<double>> keys;    // [layer][token * kv_dim]
    std::vector<std::vector<double>> values;  // [layer][token * kv_dim]
  };

  // Tokens [first_token, first_token + num_tokens) of some states, moved by
  // `shift` from the positions that they were computed at.
  struct Seen {
    const States* states = nullptr;
    size_t first_token = 0;
    size_t num_tokens = 0;
    int32_t shift = 0;

    static Seen All(const States& states, int32_t shift) {
      return {&states, 0, states.positions.size(), shift};
    }
  };

  struct Result {
    States states;
    std::vector<std::vector<double>> logits;  // [token][vocab]
  };

  // Every token sees all of `seen`, the tokens before it, and itself.
  Result Run(std::span<const Token> tokens, std::span<const Seen> seen) const;

  const ModelConfig& config() const { return config_; }

 private:
  struct Matrix {
    size_t rows = 0;
    size_t cols = 0;
    std::vector<float> values;
  };
  struct Layer {
    Matrix attention_norm, query, key, value, out, ffn_norm, gate, up, down;
  };

  explicit ReferenceModel(const ModelConfig& config) : config_(config) {}

  static absl::StatusOr<Matrix> Load(const ModelFile& file, TensorRole role,
                                     uint32_t layer, Weights weights);
  static std::vector<double> Multiply(const Matrix& matrix,
                                      std::span<const double> x);
  std::vector<double> Norm(const Matrix& weight,
                           std::span<const double> x) const;
  void Rotate(std::span<double> head, int32_t position) const;
  std::vector<double> Attend(uint32_t layer, std::vector<double> query,
                             int32_t position,
                             std::span<const Seen> seen) const;
  void Feed(const Layer& layer, std::vector<double>& x) const;

  const ModelConfig config_;
  Matrix embedding_;
  Matrix output_norm_;
  Matrix output_;  // empty when tied to the embedding
  std::vector<Layer> layers_;
};

// Consecutive tokens from `start`, as Run takes them.
std::vector<ReferenceModel::Token> TokensAt(std::span<const int32_t> ids,
                                            int32_t start);

}  // namespace promptcache::worker
