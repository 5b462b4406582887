#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/tokenizer.h"

namespace promptcache::cli {

// What commands without a server need of a model.
struct LocalVocabulary {
  std::unique_ptr<Tokenizer> tokenizer;
  ChatTemplate chat_template;
  int32_t context_length = 0;
};

// `model`: a GGUF file or a Hugging Face folder (a vocabulary will do), "" for
// the default one.
// `template_name`: "" for the file's own.
absl::StatusOr<LocalVocabulary> LoadVocabulary(
    const std::string& model, const std::string& template_name);

}  // namespace promptcache::cli
