#include "inference_worker/tokenizer/pre_tokenizer.h"

#include <array>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::worker {
namespace {

// The published patterns with \s as Unicode's White_Space: PCRE2's own \s holds
// U+180E as well, which is none.
constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+)"
    R"(| ?[^\p{White_Space}\p{L}\p{N}]+)"
    R"(|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)";
constexpr const char* kEachNumber = R"(\p{N})";

struct Row {
  std::string_view name;
  std::array<const char*, 2> steps;  // null: no more
};
constexpr std::array kRows = {
    Row{"smollm", {kEachNumber, kGpt2}},
    Row{"gpt-2", {kGpt2, nullptr}},
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreTokenizer>> PreTokenizer::Create(
    std::string_view name) {
  std::string known;
  for (const Row& row : kRows) {
    absl::StrAppend(&known, known.empty() ? "" : ", ", ToAbsl(row.name));
    if (row.name != name) continue;
    std::unique_ptr<PreTokenizer> result(new PreTokenizer());
    for (const char* pattern : row.steps) {
      if (pattern == nullptr) break;
      PC_ASSIGN_OR_RETURN(auto regex, Regex::Compile(pattern));
      result->steps_.push_back(std::move(regex));
    }
    return result;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("pre-tokenizer \"", absl::CHexEscape(ToAbsl(name)),
                   "\" is not supported; supported: ", known));
}

void PreTokenizer::SplitFrom(
    size_t step, std::string_view text,
    absl::FunctionRef<void(std::string_view)> visit) const {
  if (step == steps_.size()) {
    visit(text);
    return;
  }
  steps_[step]->Split(text, [this, step, visit](std::string_view piece) {
    SplitFrom(step + 1, piece, visit);
  });
}

}  // namespace promptcache::worker
