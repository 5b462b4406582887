#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::bench {

// A Llama of any shape whose tensors are random numbers, all read from one
// block of memory: what a forward pass costs without a file. Immutable.
class RandomModel final : public worker::ModelFile {
 public:
  struct Shape {
    std::string name;
    uint32_t num_layers = 0;
    uint32_t hidden_dim = 0;
    uint32_t num_heads = 0;
    uint32_t num_kv_heads = 0;
    uint32_t head_dim = 0;
    uint32_t ffn_dim = 0;
    uint32_t vocab_size = 0;
    uint32_t context_length = 0;
  };
  static Shape Llama2Of7B();
  static Shape Llama3Of8B();
  // For the emulator.
  static Shape Small();

  explicit RandomModel(const Shape& shape);

  const worker::ModelConfig& config() const override { return config_; }
  const worker::VocabularyData& vocabulary() const override {
    return vocabulary_;
  }
  const std::string& chat_template() const override { return nothing_; }
  const std::string& path() const override { return config_.name; }
  absl::StatusOr<worker::TensorView> Tensor(worker::TensorRole role,
                                            uint32_t layer) const override;
  absl::StatusOr<Digest> Fingerprint() const override;

  // Bytes of bf16 weights that one decoding step reads.
  uint64_t WeightBytes() const;

 private:
  worker::ModelConfig config_;
  worker::VocabularyData vocabulary_;
  std::string nothing_;
  std::vector<uint16_t> bits_;  // bf16
};

}  // namespace promptcache::bench
