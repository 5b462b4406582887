#include "inference_worker/tokenizer/tokenizer_json_parts.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/tokenizer/unigram_normalizer.h"

namespace promptcache::worker {

const Json& Field(const Json& json, const char* key) {
  static const Json null;
  if (!json.is_object()) return null;
  const auto it = json.find(key);
  return it == json.end() ? null : *it;
}

bool IsTrue(const Json& json) { return json.is_boolean() && json.get<bool>(); }

std::string_view Text(const Json& json) {
  if (!json.is_string()) return "";
  return json.get_ref<const std::string&>();
}

std::string_view TypeOf(const Json& json) { return Text(Field(json, "type")); }

absl::Status Refuse(std::string_view key, const Json& value) {
  constexpr size_t kMaxShown = 120;
  std::string shown = value.dump(-1, ' ', /*ensure_ascii=*/true,
                                 Json::error_handler_t::replace);
  if (shown.size() > kMaxShown) shown = shown.substr(0, kMaxShown) + "...";
  return absl::InvalidArgumentError(absl::StrCat(
      "tokenizer.json: ", ToAbsl(key), " ", shown, " is not supported"));
}

namespace {

absl::Status ReadNormalizer(const Json& part, std::vector<std::string>* steps,
                            std::string* charsmap) {
  const std::string_view type = TypeOf(part);
  if (type == "Precompiled" && charsmap->empty()) {
    const Json& map = Field(part, "precompiled_charsmap");
    if (map.is_null()) return absl::OkStatus();
    if (!absl::Base64Unescape(ToAbsl(Text(map)), charsmap)) {
      return Refuse("normalizer.precompiled_charsmap", map);
    }
    steps->push_back("charsmap");
    return absl::OkStatus();
  }
  if (type == "Strip") {
    if (IsTrue(Field(part, "strip_left"))) steps->push_back("strip-left");
    if (IsTrue(Field(part, "strip_right"))) steps->push_back("strip-right");
    return absl::OkStatus();
  }
  const std::string_view content = Text(Field(part, "content"));
  if (type != "Replace" || Field(Field(part, "pattern"), "Regex") != " {2,}" ||
      (content != " " && content != kSpaceMark)) {
    return Refuse("normalizer", part);
  }
  steps->push_back(content == " " ? "join-spaces" : "join-marks");
  return absl::OkStatus();
}

absl::Status ReadPreTokenizer(const Json& part,
                              std::vector<std::string>* steps) {
  const std::string_view type = TypeOf(part);
  if (type == "WhitespaceSplit") {
    steps->push_back("white-space");
    return absl::OkStatus();
  }
  if (type != "Metaspace" || Text(Field(part, "replacement")) != kSpaceMark) {
    return Refuse("pre_tokenizer", part);
  }
  const Json& split = Field(part, "split");
  if (split.is_null() || IsTrue(split)) steps->push_back("split");
  // Older files say only whether.
  const Json& scheme = Field(part, "prepend_scheme");
  const Json& adds = Field(part, "add_prefix_space");
  if (scheme.is_null() && adds.is_boolean()) {
    steps->push_back(IsTrue(adds) ? "always" : "never");
  } else if (scheme == "always" || scheme == "first" || scheme == "never") {
    steps->push_back(scheme.get<std::string>());
  } else {
    return Refuse("pre_tokenizer", part);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadUnigramSteps(const std::vector<const Json*>& normalizers,
                              const std::vector<const Json*>& pre_tokenizers,
                              VocabularyData* out) {
  std::vector<std::string> steps;
  for (const Json* part : normalizers) {
    PC_RETURN_IF_ERROR(ReadNormalizer(*part, &steps, &out->charsmap));
  }
  for (const Json* part : pre_tokenizers) {
    PC_RETURN_IF_ERROR(ReadPreTokenizer(*part, &steps));
  }
  // Without it spaces would stay spaces, which no vocabulary is made for.
  if (pre_tokenizers.empty() || TypeOf(*pre_tokenizers.back()) != "Metaspace") {
    return Refuse("pre_tokenizer",
                  pre_tokenizers.empty() ? Json() : *pre_tokenizers.back());
  }
  out->pre_tokenizer = absl::StrCat(ToAbsl(UnigramNormalizer::kStepsPrefix),
                                    "+", absl::StrJoin(steps, "+"));
  return absl::OkStatus();
}

}  // namespace promptcache::worker
