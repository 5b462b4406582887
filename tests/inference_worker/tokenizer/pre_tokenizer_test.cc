#include "inference_worker/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "inference_worker/tokenizer/literal_tokens.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::vector<std::string> Pieces(const char* name, std::string_view text) {
  const auto pre_tokenizer = PreTokenizer::Create(name);
  EXPECT_THAT(pre_tokenizer, IsOk());
  std::vector<std::string> pieces;
  (*pre_tokenizer)->Split(text, [&pieces](std::string_view piece) {
    pieces.emplace_back(piece);
  });
  return pieces;
}

TEST(PreTokenizerTest, Gpt2SplitsWordsNumbersAndSpaces) {
  EXPECT_THAT(Pieces("gpt-2", "I'll pay  $12.50, OK?\n"),
              ElementsAre("I", "'ll", " pay", " ", " $", "12", ".", "50", ",",
                          " OK", "?", "\n"));
  EXPECT_THAT(Pieces("gpt-2", ""), IsEmpty());
}

TEST(PreTokenizerTest, SmollmSetsEachDigitApart) {
  EXPECT_THAT(Pieces("smollm", "in 1984  x"),
              ElementsAre("in", " ", "1", "9", "8", "4", " ", " x"));
}

// U+180E was white space until Unicode 6.3, and is for PCRE2's \s.
TEST(PreTokenizerTest, WhiteSpaceIsUnicodesOwn) {
  EXPECT_THAT(Pieces("gpt-2", "a\u180E\u2003\u0085b"),
              ElementsAre("a", "\u180E", "\u2003", "\u0085", "b"));
}

TEST(PreTokenizerTest, AnUnknownNameIsRefusedWithThoseThatAreKnown) {
  EXPECT_THAT(PreTokenizer::Create("tekken"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("pre-tokenizer \"tekken\" is not supported; "
                                 "supported: smollm, gpt-2")));
}

TEST(RegexTest, RefusesPatternsThatCannotSplit) {
  EXPECT_THAT(Regex::Compile("(a"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("(a")));
  EXPECT_THAT(Regex::Compile("a*"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("matches the empty text")));
}

TEST(LiteralTokensTest, TakesTheLeftmostAndThereTheLongest) {
  LiteralTokens tokens;
  tokens.Add("<a>", 1);
  tokens.Add("<a><b>", 2);
  tokens.Add("a", 3);
  tokens.Add("", 4);
  std::vector<std::pair<std::string, int32_t>> parts;
  tokens.Split("x<a><b><a><c", [&parts](std::string_view text, int32_t id) {
    parts.emplace_back(text, id);
  });
  EXPECT_THAT(parts, ElementsAre(Pair("x", -1), Pair("<a><b>", 2),
                                 Pair("<a>", 1), Pair("<c", -1)));
}

}  // namespace
}  // namespace promptcache::worker
