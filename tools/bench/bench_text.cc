#include "tools/bench/bench_text.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::bench {
namespace {

constexpr std::array<const char*, 12> kWords = {
    " the",  " river", " of",   " an",  " old", " town",
    " with", " two",   " many", " and", " for", " water"};

}  // namespace

absl::StatusOr<BenchText> BenchText::Open(const std::string& model) {
  BenchText text;
  PC_ASSIGN_OR_RETURN(text.file_,
                      worker::OpenModelFile(model, {.vocabulary_only = true}));
  PC_ASSIGN_OR_RETURN(text.tokenizer_, worker::CreateTokenizer(*text.file_));
  return text;
}

absl::StatusOr<std::string> BenchText::Of(uint32_t num_tokens) {
  std::string text = "Text:";
  size_t tokens = tokenizer_->Encode(text).size();
  while (tokens < num_tokens) {
    const std::string word = kWords[random_() % kWords.size()];
    // Words are tokens of their own in almost any vocabulary; where one is
    // more, the sum is counted again.
    text += word;
    tokens += 1;
    if (tokens == num_tokens) tokens = tokenizer_->Encode(text).size();
  }
  if (tokens == num_tokens) return text;
  return absl::InternalError(
      absl::StrCat("no text of ", num_tokens, " tokens: ", tokens));
}

absl::StatusOr<std::vector<std::string>> BenchText::Several(
    size_t count, uint32_t num_tokens) {
  std::vector<std::string> texts;
  while (texts.size() < count) {
    PC_ASSIGN_OR_RETURN(texts.emplace_back(), Of(num_tokens));
  }
  return texts;
}

}  // namespace promptcache::bench
