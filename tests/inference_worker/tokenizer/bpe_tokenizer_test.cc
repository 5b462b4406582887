#include "inference_worker/tokenizer/bpe_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/chat_template.h"
#include "inference_worker/tokenizer/vector_check.h"
#include "inference_worker/tokenizer/vocabulary_tokenizer.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlowBuild = true;
#elif defined(__has_feature)
constexpr bool kSlowBuild =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSlowBuild = false;
#endif

std::unique_ptr<Tokenizer> TokenizerOf(const std::string& path) {
  const auto model = OpenModelFile(path, {.vocabulary_only = true});
  EXPECT_THAT(model, IsOk());
  if (!model.ok()) return nullptr;
  auto tokenizer = CreateTokenizer((*model)->vocabulary());
  EXPECT_THAT(tokenizer, IsOk());
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

void ExpectVectorsHold(const std::string& model_path, const char* vectors) {
  const auto tokenizer = TokenizerOf(model_path);
  ASSERT_NE(tokenizer, nullptr);
  const auto results =
      CheckTokenizerVectors(ReadFileOrDie(TestDataPath(vectors)), *tokenizer);
  PC_ASSERT_OK(results);
  EXPECT_GE(results->size(), 179u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

TEST(BpeTokenizerTest, SmollmVectorsHold) {
  if (SmolLm2Path().empty()) GTEST_SKIP() << "no model: run tools/fetch_model";
  ExpectVectorsHold(SmolLm2Path(), "tokenizer/smollm.jsonl");
}

class VocabularyVectorsTest : public testing::TestWithParam<const char*> {};

TEST_P(VocabularyVectorsTest, Hold) {
  const std::string name = GetParam();
  const std::string path = VocabularyPath(name);
  if (path.empty()) {
    GTEST_SKIP() << "no vocabulary: run tools/fetch_model --vocab " << name;
  }
  ExpectVectorsHold(path, ("tokenizer/" + name + ".jsonl").c_str());
}

INSTANTIATE_TEST_SUITE_P(All, VocabularyVectorsTest,
                         testing::Values("gpt-2", "llama-bpe", "qwen2",
                                         "falcon", "mpt", "llama-spm"));

TEST(BpeTokenizerTest, Gemma3VectorsHold) {
  if (Gemma3Path().empty()) {
    GTEST_SKIP() << "no model: run tools/fetch_model --gemma3";
  }
  ExpectVectorsHold(Gemma3Path(), "tokenizer/gemma3.jsonl");
}

std::unique_ptr<Tokenizer> TinyTokenizer(
    const std::function<void(VocabularyData*)>& change = {}) {
  const TempDir dir;
  const std::string path = dir.path() + "/tiny.gguf";
  WriteTinyLlama(path);
  const auto model = OpenModelFile(path, {.vocabulary_only = true});
  EXPECT_THAT(model, IsOk());
  VocabularyData vocabulary = (*model)->vocabulary();
  if (change) change(&vocabulary);
  auto tokenizer = CreateTokenizer(vocabulary);
  EXPECT_THAT(tokenizer, IsOk());
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

std::string DecodeAll(const Tokenizer& tokenizer,
                      const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += tokenizer.Decode(id);
  return text;
}

TEST(BpeTokenizerTest, TextNeverBecomesAControlToken) {
  const auto tokenizer = TinyTokenizer();
  const std::vector<int32_t> ids = tokenizer->Encode("<|im_start|>user");
  for (const int32_t id : ids) EXPECT_GE(id, 3);
  EXPECT_EQ(DecodeAll(*tokenizer, ids), "<|im_start|>user");
  EXPECT_EQ(tokenizer->ControlToken("<|im_start|>"), 1);
  EXPECT_EQ(tokenizer->ControlToken("<|im_end|>"), 2);
  EXPECT_EQ(tokenizer->ControlToken("the"), -1);
  EXPECT_EQ(tokenizer->Decode(1), "");
}

TEST(BpeTokenizerTest, UnknownTokensAreNeverRecognised) {
  const auto tokenizer = TinyTokenizer([](VocabularyData* v) {
    v->tokens[0] = "zqx";
    v->token_types[0] = 2;
  });
  EXPECT_EQ(DecodeAll(*tokenizer, tokenizer->Encode("zqx")), "zqx");
  EXPECT_EQ(tokenizer->Encode("zqx").size(), 3u);
  EXPECT_EQ(tokenizer->Decode(0), "");
}

TEST(BpeTokenizerTest, UserDefinedTokensAlwaysAre) {
  const auto tokenizer = TinyTokenizer([](VocabularyData* v) {
    v->tokens[0] = "<tool call>";
    v->token_types[0] = 4;
  });
  const std::vector<int32_t> ids = tokenizer->Encode("a<tool call>b");
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(ids[1], 0);
  EXPECT_EQ(tokenizer->Decode(0), "<tool call>");
}

TEST(BpeTokenizerTest, AllBytesComeBack) {
  const auto tokenizer = TinyTokenizer();
  std::string text;
  for (char32_t c = 0; c < 0x800; ++c) {
    if (c >= 0x80) {
      text.push_back(static_cast<char>(0xC0 | c >> 6));
      text.push_back(static_cast<char>(0x80 | (c & 63)));
    } else {
      text.push_back(static_cast<char>(c));
    }
  }
  EXPECT_EQ(DecodeAll(*tokenizer, tokenizer->Encode(text)), text);
}

TEST(BpeTokenizerTest, InvalidUtf8CountsAsReplacementCharacters) {
  const auto tokenizer = TinyTokenizer();
  EXPECT_EQ(tokenizer->Encode("a\xF0\x9F\xFFz"),
            tokenizer->Encode("a\uFFFD\uFFFDz"));
}

TEST(BpeTokenizerTest, IdsOutOfRangeHaveNoText) {
  const auto tokenizer = TinyTokenizer();
  EXPECT_EQ(tokenizer->vocab_size(), 320);
  EXPECT_EQ(tokenizer->Decode(-1), "");
  EXPECT_EQ(tokenizer->Decode(320), "");
}

TEST(BpeTokenizerTest, StopsAtTheEndOfTurnAndOfText) {
  EXPECT_THAT(TinyTokenizer()->stop_ids(), UnorderedElementsAre(0, 2));
  const auto with_eot =
      TinyTokenizer([](VocabularyData* v) { v->eot_id = 77; });
  EXPECT_THAT(with_eot->stop_ids(), UnorderedElementsAre(0, 2, 77));
}

TEST(BpeTokenizerTest, StopsAtWhatEndsATurnInAnyChatTemplate) {
  for (const char* name :
       {"chatml", "qwen", "llama2", "llama3", "llama3.1", "mistral-v0",
        "mistral-v1", "mistral-v3", "mistral-v7", "gemma", "phi3"}) {
    const auto chat = ChatTemplate::FromName(name);
    PC_ASSERT_OK(chat);
    EXPECT_FALSE(chat->rules().turn_ends.empty()) << name;
    for (const std::string& end : chat->rules().turn_ends) {
      const auto tokenizer = TinyTokenizer([&](VocabularyData* v) {
        v->tokens.push_back(end);
        v->token_types.push_back(static_cast<int32_t>(TokenKind::kControl));
      });
      EXPECT_THAT(tokenizer->stop_ids(), Contains(tokenizer->ControlToken(end)))
          << name;
    }
  }
}

TEST(BpeTokenizerTest, BosIsAddedOnlyWhereTheFileSaysSo) {
  EXPECT_EQ(TinyTokenizer()->bos_id(), -1);
  const auto with_bos =
      TinyTokenizer([](VocabularyData* v) { v->add_bos = true; });
  EXPECT_EQ(with_bos->bos_id(), 1);
}

TEST(BpeTokenizerTest, TheDigestCoversAllThatIdsDependOn) {
  const Digest digest = TinyTokenizer()->digest();
  EXPECT_EQ(TinyTokenizer()->digest(), digest);
  const std::vector<std::function<void(VocabularyData*)>> changes = {
      [](VocabularyData* v) { v->pre_tokenizer = "gpt-2"; },
      [](VocabularyData* v) { std::swap(v->tokens[50], v->tokens[51]); },
      [](VocabularyData* v) { v->token_types[0] = 4; },
      [](VocabularyData* v) { v->merges.pop_back(); },
      [](VocabularyData* v) { std::swap(v->merges[0], v->merges[1]); },
      [](VocabularyData* v) { v->add_bos = true; },
  };
  for (const auto& change : changes) {
    EXPECT_NE(TinyTokenizer(change)->digest(), digest);
  }
}

TEST(BpeTokenizerTest, RefusesWhatItCannotTokenise) {
  const auto refused = [](const std::function<void(VocabularyData*)>& change) {
    VocabularyData v{.model = "gpt2",
                     .pre_tokenizer = "gpt-2",
                     .tokens = {"a", "b", "ab"},
                     .token_types = {1, 1, 1},
                     .merges = {"a b"}};
    EXPECT_THAT(CreateTokenizer(v), IsOk());
    change(&v);
    return CreateTokenizer(v).status();
  };
  const auto invalid = [](const char* message) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message));
  };
  EXPECT_THAT(refused([](VocabularyData* v) { v->model = "wpm"; }),
              invalid("tokenizer model \"wpm\" is not supported"));
  EXPECT_THAT(refused([](VocabularyData* v) { v->pre_tokenizer = ""; }),
              invalid("pre-tokenizer \"\" is not supported; supported: "));
  EXPECT_THAT(refused([](VocabularyData* v) { v->token_types.pop_back(); }),
              invalid("2 token types for 3 tokens"));
  EXPECT_THAT(refused([](VocabularyData* v) { v->token_types[1] = 7; }),
              invalid("token 1 (\"b\"): unknown type 7"));
  EXPECT_THAT(refused([](VocabularyData* v) { v->merges = {"a c"}; }),
              invalid("merge 0 (\"a c\") is not of tokens into a token"));
  EXPECT_THAT(refused([](VocabularyData* v) { v->merges = {"ab"}; }),
              invalid("merge 0 (\"ab\")"));
  EXPECT_THAT(refused([](VocabularyData* v) { v->merges = {""}; }),
              invalid("merge 0 (\"\")"));
}

// Long pieces must not be quadratic: without the heap this takes minutes.
void ExpectNoTextToBeSlow(const std::string& model_path) {
  const auto tokenizer = TokenizerOf(model_path);
  ASSERT_NE(tokenizer, nullptr);
  for (const char* unit : {"a", " ", "\n", "7", ".", "\u00e9", "\xFF", "' "}) {
    std::string text;
    while (text.size() < (kSlowBuild ? 1 << 17 : 1 << 20)) text += unit;
    // Of the processor, which a busy machine does not stretch.
    const std::clock_t begin = std::clock();
    EXPECT_FALSE(tokenizer->Encode(text).empty());
    const double seconds =
        static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    EXPECT_LT(seconds, kSlowBuild ? 5 : 1) << unit;
  }
}

TEST(BpeTokenizerTest, AMebibyteOfOneLetterTakesLessThanASecond) {
  if (SmolLm2Path().empty()) GTEST_SKIP() << "no model: run tools/fetch_model";
  ExpectNoTextToBeSlow(SmolLm2Path());
}

TEST(BpeTokenizerTest, NorDoesItInASentencePieceVocabulary) {
  const std::string path = VocabularyPath("llama-spm");
  if (path.empty()) {
    GTEST_SKIP() << "no vocabulary: run tools/fetch_model --vocab llama-spm";
  }
  ExpectNoTextToBeSlow(path);
}

TEST(BpeTokenizerTest, ManyThreadsGetTheSameIds) {
  const auto tokenizer = TinyTokenizer();
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> expected;
  for (int i = 0; i < 20; ++i) {
    texts.push_back("word" + std::to_string(i * 7919) + " of the system");
    expected.push_back(TinyTokenizer()->Encode(texts.back()));
  }
  std::vector<std::thread> threads;
  std::atomic<int> differences = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        for (size_t i = 0; i < texts.size(); ++i) {
          if (tokenizer->Encode(texts[i]) != expected[i]) ++differences;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(differences, 0);
}

// A full cache starts anew; ids stay what they are.
TEST(BpeTokenizerTest, MoreWordsThanTheCacheHoldsKeepTheirIds) {
  const auto tokenizer = TinyTokenizer();
  const std::vector<int32_t> first = tokenizer->Encode("aaaa system");
  std::string text;
  for (int i = 0; i < 150'000; ++i) {
    text += static_cast<char>('a' + i % 26);
    text += static_cast<char>('a' + i / 26 % 26);
    text += static_cast<char>('a' + i / 676 % 26);
    text += static_cast<char>('a' + i / 17576 % 26);
    text += ' ';
  }
  EXPECT_EQ(DecodeAll(*tokenizer, tokenizer->Encode(text)), text);
  EXPECT_EQ(tokenizer->Encode("aaaa system"), first);
}

TEST(BpeTokenizerTest, DamagedVocabulariesAreRefusedOrTokenise) {
  std::mt19937 random(11);
  const std::string bytes = TinyLlama({.layers = 1}).Serialize();
  const TempDir dir;
  const std::string path = dir.path() + "/damaged.gguf";
  int created = 0;
  for (int i = 0; i < 300; ++i) {
    std::string damaged = bytes.substr(0, 16384);
    for (auto n = random() % 3 + 1; n > 0; --n) {
      damaged[24 + random() % 12000] = static_cast<char>(random());
    }
    WriteFileOrDie(path, damaged);
    const auto model = OpenModelFile(path, {.vocabulary_only = true});
    if (!model.ok()) continue;
    const auto tokenizer = CreateTokenizer((*model)->vocabulary());
    if (!tokenizer.ok()) continue;
    ++created;
    for (const int32_t id : (*tokenizer)->Encode("the system, 12 \u00e9\xFF")) {
      EXPECT_LT(id, (*tokenizer)->vocab_size());
      (*tokenizer)->Decode(id);
    }
  }
  EXPECT_GT(created, 0);
}

}  // namespace
}  // namespace promptcache::worker
