#include "inference_worker/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/tokenizer/nfc.h"

namespace promptcache::worker {
namespace {

constexpr std::string_view kWholeStep = "whole";
constexpr std::string_view kNfcStep = "nfc";

// What a step cuts at, as we give it to PCRE2: the published pattern with \s as
// Unicode's White_Space, since PCRE2's own \s holds U+180E as well, which is
// none.
struct Step {
  std::string_view name;
  const char* pattern;
  // As tokenizer.json files spell it; "": by another type than Split.
  std::string_view published = "";
  // Cuts at bytes: what follows may end in half a character.
  bool cuts_bytes = false;
};
constexpr std::array kSteps = {
    Step{"gpt2",
         R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+)"
         R"(| ?[^\p{White_Space}\p{L}\p{N}]+)"
         R"(|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)",
         R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)"
         R"(|\s+(?!\S)|\s+)"},
    Step{"llama3",
         R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
         R"(| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+)"
         R"(|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)",
         R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
         R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    Step{"qwen2",
         R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
         R"(| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+)"
         R"(|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)",
         R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
         R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    Step{"digit", R"(\p{N})"},
    Step{"digits", R"(\p{N}+)"},
    Step{"punctuation", R"([\p{P}$+<=>^`|~]+)"},
    // Falcon looks for numbers after bytes were spelled as characters
    // (byte_level.h), where these six spell themselves and are numeric.
    Step{"spelled-digits", R"([0-9\xB2\xB3\xB9\xBC\xBD\xBE]+)", "", true},
    Step{"3digits", "[0-9][0-9][0-9]", "[0-9][0-9][0-9]", true},
};

// Families by the names that GGUF's `tokenizer.ggml.pre` has for them.
struct Family {
  std::string_view name;
  std::string_view steps;
};
constexpr std::array kFamilies = {
    Family{"smollm", "digit+gpt2"},
    Family{"gpt-2", "gpt2"},
    Family{"llama-bpe", "whole+llama3"},
    Family{"qwen2", "nfc+qwen2"},
    Family{"falcon", "punctuation+gpt2+spelled-digits+3digits"},
    Family{"mpt", "nfc+gpt2"},
    // Other names for the same.
    Family{"codeshell", "digit+gpt2"},
    Family{"refact", "digit+gpt2"},
    Family{"starcoder", "digit+gpt2"},
    Family{"phi-2", "gpt2"},
    Family{"gpt-neox", "nfc+gpt2"},
    Family{"olmo", "nfc+gpt2"},
    Family{"llama3", "whole+llama3"},
    Family{"llama-v3", "whole+llama3"},
};

}  // namespace

absl::Status PreTokenizer::AddStep(std::string_view name) {
  if (name == kWholeStep) {
    takes_whole_tokens_ = true;
    return absl::OkStatus();
  }
  if (name == kNfcStep) {
    composes_ = true;
    return absl::OkStatus();
  }
  const auto step = std::find_if(kSteps.begin(), kSteps.end(),
                                 [&](const Step& s) { return s.name == name; });
  if (step == kSteps.end()) return absl::NotFoundError("no such step");
  if (cuts_bytes_ && !step->cuts_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pre-tokenizer: step ", ToAbsl(name), " after one that cuts bytes"));
  }
  cuts_bytes_ = step->cuts_bytes;
  PC_ASSIGN_OR_RETURN(
      auto regex, Regex::Compile(step->pattern, step->cuts_bytes
                                                    ? Regex::Unit::kByte
                                                    : Regex::Unit::kCharacter));
  steps_.push_back(std::move(regex));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PreTokenizer>> PreTokenizer::Create(
    std::string_view name) {
  std::string_view steps = name;
  std::string known;
  for (const Family& family : kFamilies) {
    absl::StrAppend(&known, known.empty() ? "" : ", ", ToAbsl(family.name));
    if (family.name == name) steps = family.steps;
  }
  std::unique_ptr<PreTokenizer> result(new PreTokenizer());
  for (const absl::string_view step : absl::StrSplit(ToAbsl(steps), '+')) {
    const absl::Status added = result->AddStep(ToStd(step));
    if (absl::IsNotFound(added)) {
      return absl::InvalidArgumentError(
          absl::StrCat("pre-tokenizer \"", absl::CHexEscape(ToAbsl(name)),
                       "\" is not supported; supported: ", known));
    }
    PC_RETURN_IF_ERROR(added);
  }
  return result;
}

std::string_view PreTokenizer::StepOfPattern(std::string_view published) {
  for (const Step& step : kSteps) {
    if (!step.published.empty() && step.published == published) {
      return step.name;
    }
  }
  return "";
}

std::string_view PreTokenizer::Normalize(std::string_view text,
                                         std::string* buffer) const {
  return composes_ ? ToNfc(text, buffer) : text;
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
