#include "inference_worker/tokenizer/bpe_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "inference_worker/tokenizer/vector_check.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

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
  EXPECT_EQ(results->size(), 180u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

TEST(BpeTokenizerTest, SmollmVectorsHold) {
  if (SmolLm2Path().empty()) GTEST_SKIP() << "no model: run tools/fetch_model";
  ExpectVectorsHold(SmolLm2Path(), "tokenizer/smollm.jsonl");
}

TEST(BpeTokenizerTest, Gpt2VectorsHold) {
  if (Gpt2VocabularyPath().empty()) {
    GTEST_SKIP() << "no vocabulary: run tools/fetch_model --gpt2-vocab";
  }
  ExpectVectorsHold(Gpt2VocabularyPath(), "tokenizer/gpt-2.jsonl");
}

}  // namespace
}  // namespace promptcache::worker
