#include "tools/cli/vector_files.h"

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::json;

std::string NameOf(const Json& one, const char* word, size_t index) {
  if (one.is_object()) {
    const auto name = one.find("name");
    if (name != one.end() && name->is_string()) return name->get<std::string>();
  }
  return absl::StrCat(word, " ", index + 1);
}

bool IsTokenizerCase(const Json& line) {
  return line.is_object() &&
         (line.contains("ids") || line.contains("ids_rle") ||
          line.contains("decode_ids")) &&
         (line.contains("text") || line.contains("repeat") ||
          line.contains("bytes_hex"));
}

VectorFile ParseLines(const std::string& text) {
  VectorFile file;
  bool any = false;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    // A line that is no case is one that fails, when the others are cases.
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    any = any || IsTokenizerCase(json);
    file.parts.push_back({absl::StrCat("line ", number), line});
  }
  if (any) {
    file.kind = VectorKind::kTokenizer;
  } else {
    file.kind = VectorKind::kDamaged;
    file.problem = "no line of it is a case that is known here";
  }
  return file;
}

// The document with one element of its list `key`.
void Split(const Json& document, const char* key, const char* word,
           VectorFile* file) {
  const Json& list = document[key];
  Json frame = document;
  frame.erase(key);
  for (size_t i = 0; i < list.size(); ++i) {
    Json one = frame;
    one[key] = Json::array({list[i]});
    file->parts.push_back(
        {NameOf(list[i], word, i),
         one.dump(-1, ' ', false, Json::error_handler_t::replace)});
  }
}

template <typename Predicate>
bool AnyElement(const Json& list, const Predicate& predicate) {
  for (const Json& element : list) {
    if (element.is_object() && predicate(element)) return true;
  }
  return false;
}

// Whether a chat template's conversations need a tokenizer.
bool HasIds(const Json& family) {
  return family.is_object() && family.contains("cases") &&
         AnyElement(family["cases"],
                    [](const Json& c) { return c.contains("ids"); });
}

void SplitFolderLogits(const Json& document, VectorFile* file) {
  file->kind = VectorKind::kFolderLogits;
  for (const char* list : {"inputs", "greedy"}) {
    if (!document.contains(list)) continue;
    for (size_t i = 0; i < document[list].size(); ++i) {
      file->parts.push_back({absl::StrCat(list, " ", i), ""});
    }
  }
  if (document.contains("positions_test")) {
    file->parts.push_back({"positions_test", ""});
  }
}

VectorFile ParseDocument(const std::string& text) {
  VectorFile file;
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& e) {
    file.kind = VectorKind::kDamaged;
    file.problem = absl::StrCat("not JSON: ", e.what());
    return file;
  }
  const auto is_list = [&](const char* key) {
    return json.is_object() && json.contains(key) && json[key].is_array();
  };
  if (is_list("chat_templates")) {
    file.kind = VectorKind::kConversations;
    for (const Json& family : json["chat_templates"]) {
      file.has_ids = file.has_ids || HasIds(family);
    }
    Split(json, "chat_templates", "chat template", &file);
  } else if (is_list("cases") && AnyElement(json["cases"], [](const Json& c) {
               return c.contains("schema") || c.contains("expect");
             })) {
    file.kind = VectorKind::kPml;
    Split(json, "cases", "case", &file);
  } else if (is_list("cases") && AnyElement(json["cases"], [](const Json& c) {
               return c.contains("segments") || c.contains("plan");
             })) {
    file.kind = VectorKind::kLogits;
    Split(json, "cases", "case", &file);
  } else if (is_list("vectors") &&
             AnyElement(json["vectors"],
                        [](const Json& v) { return v.contains("ids"); })) {
    file.kind = VectorKind::kLogits;
    Split(json, "vectors", "vector", &file);
  } else if (is_list("inputs")) {
    SplitFolderLogits(json, &file);
  }
  return file;
}

}  // namespace

VectorFile ParseVectorFile(const std::string& path, const std::string& text) {
  if (absl::EndsWith(ToAbsl(path), ".jsonl")) return ParseLines(text);
  return ParseDocument(text);
}

}  // namespace promptcache::cli
