#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// The vocabulary of a Hugging Face folder from its tokenizer.json and, for BOS
// and EOS, its tokenizer_config.json ("": there is none). Each part is
// recognised by its content; InvalidArgument, with the key and the value, for
// what CreateTokenizer would not tokenise as that file says.
absl::StatusOr<VocabularyData> ReadTokenizerJson(
    std::string_view tokenizer_json, std::string_view tokenizer_config_json);

}  // namespace promptcache::worker
