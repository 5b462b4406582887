#include "inference_worker/tokenizer/vector_check.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "nlohmann/json.hpp"

namespace promptcache::worker {
namespace {

using Json = nlohmann::json;

// What `text` may at most grow to: a file of vectors is not trusted either.
constexpr uint64_t kMaxCaseItems = uint64_t{1} << 24;

absl::Status Malformed(const char* what) {
  return absl::InvalidArgumentError(what);
}

bool IsId(const Json& json) {
  return json.is_number_integer() && json >= INT32_MIN && json <= INT32_MAX;
}

bool IsIdList(const Json& json) {
  return json.is_array() && std::all_of(json.begin(), json.end(), IsId);
}

// [first, count], count >= 0 and bounded.
bool IsCounted(const Json& json) {
  return json.is_array() && json.size() == 2 && json[1].is_number_unsigned() &&
         json[1] <= kMaxCaseItems;
}

absl::StatusOr<std::string> FromHex(const Json& hex) {
  if (!hex.is_string()) return Malformed("bytes_hex is not a string");
  const auto& digits = hex.get_ref<const std::string&>();
  if (digits.size() % 2 != 0 ||
      digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    return Malformed("bytes_hex is not pairs of hexadecimal digits");
  }
  return absl::HexStringToBytes(digits);
}

absl::StatusOr<std::string> InputText(const Json& line) {
  if (line.contains("bytes_hex")) return FromHex(line["bytes_hex"]);
  if (line.contains("text")) {
    if (!line["text"].is_string()) return Malformed("text is not a string");
    return line["text"].get<std::string>();
  }
  if (!line.contains("repeat")) {
    return Malformed("none of text, repeat, bytes_hex, decode_ids");
  }
  const Json& repeat = line["repeat"];
  if (!IsCounted(repeat) || !repeat[0].is_string()) {
    return Malformed("repeat is not [unit, count]");
  }
  const auto& unit = repeat[0].get_ref<const std::string&>();
  const auto count = repeat[1].get<uint64_t>();
  if (unit.size() * count > kMaxCaseItems) {
    return Malformed("repeat is too long");
  }
  std::string text;
  for (uint64_t i = 0; i < count; ++i) text.append(unit);
  return text;
}

absl::StatusOr<std::vector<int32_t>> ExpectedIds(const Json& line) {
  if (line.contains("ids")) {
    if (!IsIdList(line["ids"])) return Malformed("ids is not a list of ids");
    return line["ids"].get<std::vector<int32_t>>();
  }
  if (!line.contains("ids_rle") || !line["ids_rle"].is_array()) {
    return Malformed("neither ids nor ids_rle");
  }
  std::vector<int32_t> ids;
  for (const Json& run : line["ids_rle"]) {
    if (!IsCounted(run) || !IsId(run[0])) {
      return Malformed("ids_rle is not [[id, count], ...]");
    }
    const auto count = run[1].get<uint64_t>();
    if (ids.size() + count > kMaxCaseItems) {
      return Malformed("ids_rle is too long");
    }
    ids.insert(ids.end(), count, run[0].get<int32_t>());
  }
  return ids;
}

std::string FirstDifference(const std::vector<int32_t>& expected,
                            const std::vector<int32_t>& got) {
  const auto [e, g] =
      std::mismatch(expected.begin(), expected.end(), got.begin(), got.end());
  if (e == expected.end() && g == got.end()) return "";
  const auto show = [](auto it, auto end) {
    return it == end ? std::string("no more") : std::to_string(*it);
  };
  return absl::StrCat("token ", e - expected.begin(), ": expected ",
                      show(e, expected.end()), ", got ", show(g, got.end()),
                      " (of ", expected.size(), " expected, ", got.size(),
                      " got)");
}

std::string FirstDifference(const std::string& expected,
                            const std::string& got) {
  if (expected == got) return "";
  const auto at =
      std::mismatch(expected.begin(), expected.end(), got.begin(), got.end())
          .first -
      expected.begin();
  return absl::StrCat("byte ", at, ": expected ",
                      absl::BytesToHexString(expected), ", got ",
                      absl::BytesToHexString(got));
}

absl::StatusOr<std::string> CheckLine(const Json& line,
                                      const Tokenizer& tokenizer) {
  if (line.contains("decode_ids")) {
    if (!IsIdList(line["decode_ids"])) {
      return Malformed("decode_ids is not a list of ids");
    }
    if (!line.contains("bytes_hex")) {
      return Malformed("decode_ids without bytes_hex");
    }
    PC_ASSIGN_OR_RETURN(const std::string expected, FromHex(line["bytes_hex"]));
    std::string got;
    for (const int32_t id : line["decode_ids"].get<std::vector<int32_t>>()) {
      got += tokenizer.Decode(id);
    }
    return FirstDifference(expected, got);
  }
  PC_ASSIGN_OR_RETURN(const std::string text, InputText(line));
  PC_ASSIGN_OR_RETURN(const std::vector<int32_t> expected, ExpectedIds(line));
  return FirstDifference(expected, tokenizer.Encode(text));
}

// "line 7: {"text": "The old ...".
std::string CaseName(size_t number, std::string_view line) {
  constexpr size_t kMaxShown = 60;
  return absl::StrCat("line ", number, ": ", ToAbsl(line.substr(0, kMaxShown)),
                      line.size() > kMaxShown ? "..." : "");
}

}  // namespace

absl::StatusOr<std::vector<CaseResult>> CheckTokenizerVectors(
    std::string_view jsonl_text, const Tokenizer& tokenizer) {
  std::vector<CaseResult> results;
  for (size_t number = 1; !jsonl_text.empty(); ++number) {
    const size_t end = std::min(jsonl_text.find('\n'), jsonl_text.size());
    const std::string_view line = jsonl_text.substr(0, end);
    jsonl_text.remove_prefix(std::min(end + 1, jsonl_text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = Json::parse(line, /*cb=*/nullptr,
                                  /*allow_exceptions=*/false);
    const absl::StatusOr<std::string> difference =
        json.is_object() ? CheckLine(json, tokenizer)
                         : Malformed("not a JSON object");
    if (!difference.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", difference.status().message()));
    }
    results.push_back({CaseName(number, line), *difference});
  }
  return results;
}

}  // namespace promptcache::worker
