#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "inference_worker/tokenizer/regex.h"

namespace promptcache::worker {

// Cuts text into the pieces that are merged on their own: a list of patterns,
// each applied to the pieces of the one before. Immutable and thread-safe.
class PreTokenizer {
 public:
  // By the name that model files use. InvalidArgument for another one, with
  // those that are known.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(
      std::string_view name);

  // In order; together the pieces are `text`. REQUIRES: text is valid UTF-8.
  void Split(std::string_view text,
             absl::FunctionRef<void(std::string_view)> visit) const {
    SplitFrom(/*step=*/0, text, visit);
  }

 private:
  PreTokenizer() = default;
  void SplitFrom(size_t step, std::string_view text,
                 absl::FunctionRef<void(std::string_view)> visit) const;

  std::vector<std::unique_ptr<Regex>> steps_;
};

}  // namespace promptcache::worker
