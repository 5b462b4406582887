#pragma once

// Inside tokenizer_json: how its parts are read.

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "inference_worker/model/model_file.h"
#include "nlohmann/json.hpp"

namespace promptcache::worker {

using Json = nlohmann::json;

inline constexpr std::string_view kSpaceMark = "\u2581";

// Null where there is no such field or `json` is no object.
const Json& Field(const Json& json, const char* key);
bool IsTrue(const Json& json);
// "" for what is no text.
std::string_view Text(const Json& json);
std::string_view TypeOf(const Json& json);
// InvalidArgument with the key and the value.
absl::Status Refuse(std::string_view key, const Json& value);

// A Unigram's normalizers and pre-tokenizers as `pre_tokenizer` and `charsmap`.
absl::Status ReadUnigramSteps(const std::vector<const Json*>& normalizers,
                              const std::vector<const Json*>& pre_tokenizers,
                              VocabularyData* out);

}  // namespace promptcache::worker
