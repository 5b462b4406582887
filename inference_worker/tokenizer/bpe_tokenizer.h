#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/tokenizer.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// A tokenizer for the vocabulary of a model file, by its `model`.
// InvalidArgument for a tokenizer model or pre-tokenizer not known here, with
// its name and those that are.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateTokenizer(
    const VocabularyData& vocabulary);

// The same for an opened file, or for a folder's tokenizer.json.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateTokenizer(
    const ModelFile& file);

// Turns decoded bytes into text that never ends in half a character: what may
// still become one is held back until it is complete; what cannot is replaced
// by U+FFFD. Thread-compatible.
class Utf8Stream {
 public:
  // Appends bytes; returns what may be shown now.
  std::string Push(std::string_view bytes);
  // The end: an incomplete rest becomes U+FFFD.
  std::string Finish();

 private:
  std::string pending_;
};

}  // namespace promptcache::worker
