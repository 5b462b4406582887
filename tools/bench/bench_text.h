#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/tokenizer.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::bench {

// Words that are nothing to a model, of an exact number of tokens in a
// model's vocabulary. Thread-compatible.
class BenchText {
 public:
  // Reads the vocabulary only.
  static absl::StatusOr<BenchText> Open(const std::string& model);

  // Of `num_tokens` tokens, or InternalError where no words come out at that.
  absl::StatusOr<std::string> Of(uint32_t num_tokens);
  // `count` such, each another.
  absl::StatusOr<std::vector<std::string>> Several(size_t count,
                                                   uint32_t num_tokens);

 private:
  std::unique_ptr<worker::ModelFile> file_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::mt19937 random_{7};
};

}  // namespace promptcache::bench
