#include "inference_worker/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <vector>

#include "inference_worker/tokenizer/literal_tokens.h"
#include "inference_worker/tokenizer/nfc.h"
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

TEST(PreTokenizerTest, Llama3TakesThreeDigitsAndLineBreaksWithSigns) {
  EXPECT_THAT(Pieces("llama-bpe", "I'LL (see) 12345\n\n x!\n"),
              ElementsAre("I", "'LL", " (", "see", ")", " ", "123", "45",
                          "\n\n", " x", "!\n"));
  EXPECT_THAT(Pieces("qwen2", "a 12"), ElementsAre("a", " ", "1", "2"));
}

TEST(PreTokenizerTest, FalconLooksForNumbersAmongSpelledBytes) {
  EXPECT_THAT(
      Pieces("falcon", "a--b 12345, x\u00b2"),
      ElementsAre("a", "--", "b", " ", "123", "45", ",", " x", "\xC2", "\xB2"));
}

TEST(PreTokenizerTest, StepsMayBeNamedOneByOne) {
  EXPECT_EQ(Pieces("digit+gpt2", "in 1984  x"), Pieces("smollm", "in 1984  x"));
  EXPECT_TRUE((*PreTokenizer::Create("whole+gpt2"))->takes_whole_tokens());
  EXPECT_THAT(PreTokenizer::Create("gpt2+no"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"gpt2+no\" is not supported")));
  EXPECT_THAT(PreTokenizer::Create("spelled-digits+gpt2"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("after one that cuts bytes")));
}

TEST(NfcTest, ComposesAndOrdersMarks) {
  std::string buffer;
  EXPECT_EQ(ToNfc("plain", &buffer), "plain");
  EXPECT_EQ(ToNfc("e\u0301 \u1100\u1161 \u212B", &buffer),
            "\u00e9 \uac00 \u00c5");
  EXPECT_EQ(ToNfc("q\u0307\u0323", &buffer), "q\u0323\u0307");
}

// Marks in the wrong order, all in one run: a sort by insertion takes minutes.
TEST(NfcTest, AMebibyteOfMarksTakesLessThanASecond) {
  std::string text = "a";
  while (text.size() < (1 << 20)) text += "\u0301\u0323";
  std::string buffer;
  const std::clock_t begin = std::clock();
  EXPECT_LE(ToNfc(text, &buffer).size(), text.size());
  const double seconds =
      static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 1);
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
