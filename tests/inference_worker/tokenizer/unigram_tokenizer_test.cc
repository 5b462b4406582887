#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "inference_worker/tokenizer/charsmap.h"
#include "inference_worker/tokenizer/piece_trie.h"
#include "inference_worker/tokenizer/tokenizer_json.h"
#include "inference_worker/tokenizer/vector_check.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::string Folder(const std::string& name) {
  return TestDataPath("tokenizer/" + name);
}

std::unique_ptr<Tokenizer> Open(const std::string& path) {
  const auto file = OpenModelFile(path, {.vocabulary_only = true});
  EXPECT_THAT(file, IsOk());
  if (!file.ok()) return nullptr;
  auto tokenizer = CreateTokenizer(**file);
  EXPECT_THAT(tokenizer, IsOk());
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

// The folder's vocabulary: a GGUF file, or itself.
class UnigramVectorsTest : public testing::TestWithParam<const char*> {};

TEST_P(UnigramVectorsTest, Hold) {
  const std::string folder = Folder(GetParam());
  const bool is_hf = absl::StrCat(GetParam()).find("hf") != std::string::npos;
  const auto tokenizer = Open(is_hf ? folder : folder + "/vocabulary.gguf");
  ASSERT_NE(tokenizer, nullptr);
  const auto results = CheckTokenizerVectors(
      ReadFileOrDie(folder + "/vectors.jsonl"), *tokenizer);
  PC_ASSERT_OK(results);
  EXPECT_GE(results->size(), 95u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, UnigramVectorsTest,
                         testing::Values("unigram-t5", "unigram-bytes",
                                         "unigram-hf", "unigram-hf-trained"));

// Pieces "a" -1, "b" -2, "ab" -2.5, "▁" -1.5, "▁a" -2, "<s>" control.
VocabularyData Small() {
  VocabularyData v;
  v.model = "t5";
  v.tokens = {"<unk>", "<s>", "a", "b", "ab", "\u2581", "\u2581a"};
  v.token_types = {2, 3, 1, 1, 1, 1, 1};
  v.scores = {0, 0, -1, -2, -2.5f, -1.5f, -2};
  return v;
}

std::vector<int32_t> Ids(const VocabularyData& vocabulary,
                         std::string_view text) {
  const auto tokenizer = CreateTokenizer(vocabulary);
  EXPECT_THAT(tokenizer, IsOk());
  return tokenizer.ok() ? (*tokenizer)->Encode(text) : std::vector<int32_t>();
}

TEST(UnigramTokenizerTest, TakesTheWayWithTheHighestSum) {
  VocabularyData v = Small();
  EXPECT_THAT(Ids(v, "ab"), ElementsAre(5, 4));  // -4, not -2 - 2 = -4: first
  v.scores[4] = -3.5f;
  EXPECT_THAT(Ids(v, "ab"), ElementsAre(6, 3));
  v.add_space_prefix = false;
  EXPECT_THAT(Ids(v, "ab"), ElementsAre(2, 3));
  v.scores[4] = -2.5f;
  EXPECT_THAT(Ids(v, "ab"), ElementsAre(4));
}

TEST(UnigramTokenizerTest, NeighbouringUnknownCharactersAreOne) {
  VocabularyData v = Small();
  EXPECT_THAT(Ids(v, "xyaz"), ElementsAre(5, 0, 2, 0));
  EXPECT_THAT(Ids(v, "\u4f60\u597d"), ElementsAre(5, 0));
}

TEST(UnigramTokenizerTest, TextNeverBecomesAControlToken) {
  const auto tokenizer = CreateTokenizer(Small());
  PC_ASSERT_OK(tokenizer);
  EXPECT_THAT((*tokenizer)->Encode("<s>"), ElementsAre(5, 0));
  EXPECT_EQ((*tokenizer)->ControlToken("<s>"), 1);
  EXPECT_EQ((*tokenizer)->Decode(6), " a");
}

TEST(UnigramTokenizerTest, LiteralTokensAreTakenWhole) {
  VocabularyData v = Small();
  v.tokens.push_back("ba");
  v.token_types.push_back(4);
  v.scores.push_back(0);
  EXPECT_THAT(Ids(v, "abab"), ElementsAre(6, 7, 3));
}

TEST(UnigramTokenizerTest, WordsOnTheirOwnAreTheTextAsAWhole) {
  // With a piece over words each text is one; without it, words are.
  const std::string bytes = Folder("unigram-bytes") + "/vocabulary.gguf";
  const auto file = OpenModelFile(bytes, {.vocabulary_only = true});
  PC_ASSERT_OK(file);
  VocabularyData v = (*file)->vocabulary();
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    const size_t text = v.tokens[i].find_first_not_of("\u2581");
    if (text != std::string::npos &&
        v.tokens[i].find("\u2581", text) != std::string::npos) {
      v.token_types[i] = 5;  // unused
    }
  }
  const auto words = CreateTokenizer(v);
  PC_ASSERT_OK(words);
  // Never chosen, but there: nothing is cut.
  v.tokens.push_back("a\u2581b");
  v.token_types.push_back(1);
  v.scores.push_back(-1000);
  const auto whole = CreateTokenizer(v);
  PC_ASSERT_OK(whole);
  std::mt19937 random(4);
  for (int i = 0; i < 200; ++i) {
    std::string text;
    for (int n = 0; n < 40; ++n) text += "the licens, x\xC3\xA9"[random() % 15];
    EXPECT_EQ((*words)->Encode(text), (*whole)->Encode(text)) << text;
  }
}

// 5 s is far above what it takes (0.1 s) and far below what a quadratic one
// would (hours).
TEST(UnigramTokenizerTest, LongInputIsNotQuadratic) {
  const auto tokenizer = Open(Folder("unigram-hf"));
  ASSERT_NE(tokenizer, nullptr);
  for (const char* unit : {"a", " ", "\u4f60", "\u2581", "e"}) {
    std::string text;
    while (text.size() < (size_t{1} << 20)) text += unit;
    const std::clock_t begin = std::clock();
    tokenizer->Encode(text);
    const double seconds =
        static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    RecordProperty(absl::StrCat("ms of ", unit),
                   static_cast<int>(seconds * 1e3));
    EXPECT_LT(seconds, 100) << unit;  // sanitizers are slow
  }
}

TEST(UnigramTokenizerTest, VocabulariesThatAreNoneAreRefused) {
  VocabularyData v = Small();
  v.scores.pop_back();
  EXPECT_THAT(CreateTokenizer(v), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("6 scores for 7 tokens")));
  v = Small();
  v.scores[3] = NAN;
  EXPECT_THAT(CreateTokenizer(v), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("token 3")));
  v = Small();
  v.tokens[3] = "\xFF";
  EXPECT_THAT(CreateTokenizer(v), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("token 3")));
  v = Small();
  v.charsmap = "abc";
  EXPECT_THAT(CreateTokenizer(v), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("3 bytes")));
}

TEST(UnigramTokenizerTest, TheDigestCoversScoresAndTables) {
  VocabularyData v = Small();
  const Digest digest = (*CreateTokenizer(v))->digest();
  v.scores[3] = -9;
  EXPECT_NE((*CreateTokenizer(v))->digest(), digest);
  v = Small();
  v.removes_extra_spaces = true;
  EXPECT_NE((*CreateTokenizer(v))->digest(), digest);
}

TEST(UnigramTokenizerTest, PartsOfATokenizerJsonThatAreNotKnownAreRefused) {
  const auto refusal = [](const std::string& parts) {
    const auto vocabulary = ReadTokenizerJson(
        absl::StrCat(R"({"model": {"type": "Unigram", "unk_id": 0, "vocab":
                     [["<unk>", 0], ["a", -1]]}, )",
                     parts, "}"),
        "");
    return vocabulary.ok() ? "" : std::string(vocabulary.status().message());
  };
  const std::string metaspace =
      R"("pre_tokenizer": {"type": "Metaspace", "replacement": "▁",
         "prepend_scheme": "always"})";
  EXPECT_EQ(refusal(metaspace), "");
  EXPECT_THAT(refusal(R"("pre_tokenizer": null)"), HasSubstr("pre_tokenizer"));
  EXPECT_THAT(refusal(R"("pre_tokenizer": {"type": "Whitespace"})"),
              HasSubstr("pre_tokenizer"));
  EXPECT_THAT(refusal(metaspace + R"(, "normalizer": {"type": "NFKC"})"),
              HasSubstr("normalizer"));
  EXPECT_THAT(refusal(metaspace + R"(, "normalizer": {"type": "Precompiled",
                      "precompiled_charsmap": "%"})"),
              HasSubstr("precompiled_charsmap"));
  EXPECT_THAT(refusal(R"("model": {"type": "Unigram", "vocab": [["a"]]}, )" +
                      metaspace),
              HasSubstr("model.vocab[0]"));
  EXPECT_THAT(refusal(R"("model": {"type": "Unigram", "vocab": [],
                      "unk_id": 7}, )" +
                      metaspace),
              HasSubstr("model.unk_id"));
}

TEST(PieceTrieTest, VisitsWhatATextBeginsWithShortestFirst) {
  const PieceTrie trie(
      {{"abc", 1}, {"a", 2}, {"ab\xFF", 3}, {"b", 4}, {"a", 5}});
  const auto prefixes = [&](std::string_view text) {
    std::vector<std::pair<size_t, int32_t>> out;
    trie.VisitPrefixes(text,
                       [&](size_t n, int32_t id) { out.push_back({n, id}); });
    return out;
  };
  EXPECT_THAT(prefixes("abcd"), ElementsAre(Pair(1, 2), Pair(3, 1)));
  EXPECT_THAT(prefixes("ab\xFF"), ElementsAre(Pair(1, 2), Pair(3, 3)));
  EXPECT_THAT(prefixes("ab"), ElementsAre(Pair(1, 2)));
  EXPECT_THAT(prefixes("c"), IsEmpty());
  EXPECT_THAT(prefixes(""), IsEmpty());
}

// Whatever the bytes are, nothing outside of them is read (run with asan).
TEST(CharsmapTest, DamagedTablesAreRefusedOrHarmless) {
  const auto file = OpenModelFile(Folder("unigram-t5") + "/vocabulary.gguf",
                                  {.vocabulary_only = true});
  PC_ASSERT_OK(file);
  const std::string good = (*file)->vocabulary().charsmap;
  ASSERT_GT(good.size(), 100u);
  const auto map = Charsmap::Create(good);
  PC_ASSERT_OK(map);
  EXPECT_EQ(map->Match("\uFB01ne").replacement, "fi");
  EXPECT_EQ(map->Match("\uFB01ne").num_bytes, 3u);
  EXPECT_EQ(map->Match("x").num_bytes, 0u);
  std::mt19937 random(4);
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = good;
    for (int n = 0; n < 20; ++n) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (i % 3 == 0) bytes.resize(random() % bytes.size());
    const auto damaged = Charsmap::Create(bytes);
    if (!damaged.ok()) continue;
    std::string text;
    for (int n = 0; n < 30; ++n) text += static_cast<char>(random());
    for (size_t at = 0; at < text.size(); ++at) {
      EXPECT_LE(damaged->Match(text.substr(at)).num_bytes, text.size() - at);
    }
  }
}

}  // namespace
}  // namespace promptcache::worker
