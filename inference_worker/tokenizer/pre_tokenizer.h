#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "inference_worker/tokenizer/regex.h"

namespace promptcache::worker {

// What happens to text before byte-level merging: perhaps Unicode's NFC, then
// a list of patterns, each applied to the pieces of the one before. Immutable
// and thread-safe.
class PreTokenizer {
 public:
  // By the name that model files use ("llama-bpe"), or by steps joined by '+'
  // ("nfc+digits+gpt2"), which is how other files' descriptions are spelled
  // here. InvalidArgument for another one, with those that are known.
  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Create(
      std::string_view name);

  // The step that does what a published pattern does, or "".
  static std::string_view StepOfPattern(std::string_view published);

  // A piece that is a token is taken as it is, without merging.
  bool takes_whole_tokens() const { return takes_whole_tokens_; }

  // `text` in the form that Split wants. REQUIRES: valid UTF-8. What is
  // returned lies in `text` or in `*buffer`.
  std::string_view Normalize(std::string_view text, std::string* buffer) const;

  // In order; together the pieces are `text`. REQUIRES: text is valid UTF-8.
  void Split(std::string_view text,
             absl::FunctionRef<void(std::string_view)> visit) const {
    SplitFrom(/*step=*/0, text, visit);
  }

 private:
  PreTokenizer() = default;
  absl::Status AddStep(std::string_view name);
  void SplitFrom(size_t step, std::string_view text,
                 absl::FunctionRef<void(std::string_view)> visit) const;

  bool takes_whole_tokens_ = false;
  bool composes_ = false;
  bool cuts_bytes_ = false;  // the last step does
  std::vector<std::unique_ptr<Regex>> steps_;
};

}  // namespace promptcache::worker
