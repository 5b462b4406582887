#include "inference_worker/tokenizer/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "inference_worker/tokenizer/vector_check.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string& TinyJson() {
  static const std::string text =
      ReadFileOrDie(TestDataPath("models/tiny-llama2/tokenizer.json"));
  return text;
}

std::string TinyConfig() {
  return ReadFileOrDie(
      TestDataPath("models/tiny-llama2/tokenizer_config.json"));
}

TEST(TokenizerJsonTest, ReadsAByteLevelFile) {
  const auto vocabulary = ReadTokenizerJson(TinyJson(), TinyConfig());
  PC_ASSERT_OK(vocabulary);
  EXPECT_EQ(vocabulary->model, "gpt2");
  EXPECT_EQ(vocabulary->pre_tokenizer, "gpt2");
  EXPECT_EQ(vocabulary->tokens.size(), 384u);
  EXPECT_EQ(vocabulary->tokens[262], "\u0120the");
  EXPECT_EQ(vocabulary->bos_id, 1);
  EXPECT_EQ(vocabulary->eos_id, 2);
  EXPECT_FALSE(vocabulary->add_bos);
  const auto tokenizer = CreateTokenizer(*vocabulary);
  PC_ASSERT_OK(tokenizer);
  EXPECT_EQ((*tokenizer)->ControlToken("<|im_end|>"), 2);
  // Hugging Face's tokenizers 0.23.3 with the same file.
  EXPECT_THAT(
      (*tokenizer)->Encode("The ledger counted 202 barrels; \u00e9\n"),
      ElementsAre(383, 362, 370, 223, 376, 299, 85, 29, 223, 130, 105, 201));
}

// A tokenizer.json for what a GGUF file holds, as the family's own looks.
struct Published {
  const char* name;
  const char* normalizer;
  const char* pre_tokenizer;
  bool ignore_merges = false;
};

std::string PathOf(const std::string& name) {
  return name == "smollm" ? SmolLm2Path() : VocabularyPath(name);
}

// SentencePiece's scores as merges: what becomes the best token first.
Json MergesOf(const VocabularyData& v) {
  Json merges = Json::array();
  if (!v.merges.empty()) {
    for (const std::string& merge : v.merges) merges.push_back(merge);
    return merges;
  }
  std::map<std::string, size_t> ids;
  std::vector<size_t> by_score;
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    if (v.token_types[i] != 1) continue;
    ids.emplace(v.tokens[i], i);
    by_score.push_back(i);
  }
  std::sort(by_score.begin(), by_score.end(), [&](size_t a, size_t b) {
    return std::pair(-v.scores[a], a) < std::pair(-v.scores[b], b);
  });
  for (const size_t id : by_score) {
    const std::string& token = v.tokens[id];
    for (size_t i = 1; i < token.size(); ++i) {
      const std::string left = token.substr(0, i);
      const std::string right = token.substr(i);
      if (ids.contains(left) && ids.contains(right)) {
        merges.push_back({left, right});
      }
    }
  }
  return merges;
}

std::string JsonOf(const VocabularyData& v, const Published& published) {
  const bool pieces = v.model == "llama";
  Json vocabulary = Json::object();
  Json added = Json::array();
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    const int32_t type = v.token_types[i];
    if (type == 3 || type == 4) {
      added.push_back(
          {{"id", i}, {"content", v.tokens[i]}, {"special", type == 3}});
    }
    if (type != 3) vocabulary[v.tokens[i]] = i;
  }
  Json model = {{"type", "BPE"},
                {"byte_fallback", pieces},
                {"ignore_merges", published.ignore_merges},
                {"vocab", std::move(vocabulary)},
                {"merges", MergesOf(v)}};
  if (pieces) model["unk_token"] = "<unk>";
  return Json{{"added_tokens", std::move(added)},
              {"normalizer", Json::parse(published.normalizer)},
              {"pre_tokenizer", Json::parse(published.pre_tokenizer)},
              {"model", std::move(model)}}
      .dump();
}

constexpr const char* kByteLevel =
    R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";

class PublishedTest : public testing::TestWithParam<Published> {};

TEST_P(PublishedTest, TheFamilysVectorsHold) {
  const std::string name = GetParam().name;
  if (PathOf(name).empty()) {
    GTEST_SKIP() << "no vocabulary: run tools/fetch_model --vocab " << name;
  }
  const auto file = OpenModelFile(PathOf(name), {.vocabulary_only = true});
  PC_ASSERT_OK(file);
  const auto vocabulary =
      ReadTokenizerJson(JsonOf((*file)->vocabulary(), GetParam()), "");
  PC_ASSERT_OK(vocabulary);
  const auto tokenizer = CreateTokenizer(*vocabulary);
  PC_ASSERT_OK(tokenizer);
  const auto results = CheckTokenizerVectors(
      ReadFileOrDie(TestDataPath("tokenizer/" + name + ".jsonl")), **tokenizer);
  PC_ASSERT_OK(results);
  EXPECT_EQ(results->size(), 180u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PublishedTest,
    testing::Values(
        Published{"gpt-2", "null", kByteLevel},
        Published{"smollm", "null", R"({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false}]})"},
        Published{"mpt", R"({"type": "NFC"})", kByteLevel},
        Published{"falcon", "null", R"({"type": "Sequence", "pretokenizers": [
            {"type": "Punctuation", "behavior": "Contiguous"},
            {"type": "ByteLevel", "add_prefix_space": false},
            {"type": "Digits", "individual_digits": false},
            {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"},
             "behavior": "Isolated", "invert": false}]})"},
        Published{"llama-bpe", "null",
                  R"({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "behavior": "Isolated", "invert": false,
             "pattern": {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
            {"type": "ByteLevel", "add_prefix_space": false,
             "use_regex": false}]})",
                  true},
        Published{"qwen2", R"({"type": "NFC"})",
                  R"({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "behavior": "Isolated", "invert": false,
             "pattern": {"Regex": "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
            {"type": "ByteLevel", "add_prefix_space": false,
             "use_regex": false}]})"},
        Published{"llama-spm",
                  "{\"type\": \"Sequence\", \"normalizers\": ["
                  "{\"type\": \"Prepend\", \"prepend\": \"\u2581\"},"
                  "{\"type\": \"Replace\", \"pattern\": {\"String\": \" \"},"
                  " \"content\": \"\u2581\"}]}",
                  "null"}),
    [](const auto& param) {
      std::string name = param.param.name;
      std::erase(name, '-');
      return name;
    });

absl::Status Changed(const std::function<void(Json*)>& change) {
  Json json = Json::parse(TinyJson());
  change(&json);
  return ReadTokenizerJson(json.dump(), TinyConfig()).status();
}

TEST(TokenizerJsonTest, RefusesWhatItDoesNotKnowWithKeyAndValue) {
  const auto invalid = [](const char* message) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message));
  };
  PC_EXPECT_OK(Changed([](Json*) {}));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["type"] = "WordPiece"; }),
              invalid("model.type \"WordPiece\" is not supported"));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["dropout"] = 0.1; }),
              invalid("model.dropout 0.1"));
  EXPECT_THAT(
      Changed([](Json* j) { (*j)["model"]["end_of_word_suffix"] = "</w>"; }),
      invalid("model.end_of_word_suffix \"</w>\""));
  EXPECT_THAT(
      Changed([](Json* j) { (*j)["normalizer"] = {{"type", "Lowercase"}}; }),
      invalid("normalizer {\"type\":\"Lowercase\"}"));
  EXPECT_THAT(Changed([](Json* j) {
                (*j)["pre_tokenizer"]["add_prefix_space"] = true;
              }),
              invalid("pre_tokenizer {\"add_prefix_space\":true"));
  EXPECT_THAT(
      Changed([](Json* j) { (*j)["pre_tokenizer"] = {{"type", "BertPre"}}; }),
      invalid("pre_tokenizer {\"type\":\"BertPre\"}"));
  EXPECT_THAT(Changed([](Json* j) { (*j)["pre_tokenizer"] = nullptr; }),
              invalid("pre_tokenizer null"));
  EXPECT_THAT(
      Changed([](Json* j) { (*j)["decoder"] = {{"type", "WordPiece"}}; }),
      invalid("decoder {\"type\":\"WordPiece\"}"));
  EXPECT_THAT(Changed([](Json* j) {
                (*j)["added_tokens"][0]["special"] = false;
                (*j)["added_tokens"][0]["rstrip"] = true;
              }),
              invalid("added_tokens {\"content\":\"<|endoftext|>\""));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["vocab"]["x"] = -1; }),
              invalid("id of token \"x\" -1"));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["vocab"]["x"] = 1e9; }),
              invalid("id of token \"x\""));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["vocab"]["@@"] = 5; }),
              invalid("id 5 is both"));
  EXPECT_THAT(Changed([](Json* j) { (*j)["model"]["merges"] = {1}; }),
              invalid("model.merges 1"));
  EXPECT_THAT(ReadTokenizerJson("[]", ""), invalid("not a JSON object"));
  EXPECT_THAT(ReadTokenizerJson("{}", ""), invalid("model.type null"));
  EXPECT_THAT(ReadTokenizerJson(TinyJson(), "{"),
              invalid("tokenizer_config.json is not a JSON object"));
}

TEST(TokenizerJsonTest, BosIsAddedWhereTheConfigOrThePostProcessorSaysSo) {
  const auto bos = [](const std::function<void(Json*, Json*)>& change) {
    Json json = Json::parse(TinyJson());
    Json config = Json::parse(TinyConfig());
    change(&json, &config);
    const auto v = ReadTokenizerJson(json.dump(), config.dump());
    EXPECT_THAT(v, IsOk());
    return v->add_bos ? v->bos_id : -1;
  };
  const Json processor = Json::parse(
      R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
          {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}]}]})");
  EXPECT_EQ(bos([](Json*, Json* c) { (*c)["add_bos_token"] = true; }), 1);
  EXPECT_EQ(bos([&](Json* j, Json* c) {
              (*j)["post_processor"] = processor;
              c->erase("add_bos_token");
            }),
            0);
  EXPECT_EQ(bos([&](Json* j, Json*) { (*j)["post_processor"] = processor; }),
            -1);
}

// As T5's post-processor.
TEST(TokenizerJsonTest, WhatEndsATextIsThePostProcessorsLast) {
  Json json = Json::parse(TinyJson());
  EXPECT_EQ((*CreateTokenizer(*ReadTokenizerJson(json.dump(), TinyConfig())))
                ->text_end_id(),
            -1);
  json["post_processor"] = Json::parse(
      R"({"type": "TemplateProcessing", "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]})");
  const auto vocabulary = ReadTokenizerJson(json.dump(), TinyConfig());
  PC_ASSERT_OK(vocabulary);
  EXPECT_EQ(vocabulary->text_end_id, 2);
  EXPECT_FALSE(vocabulary->add_bos);
  EXPECT_EQ((*CreateTokenizer(*vocabulary))->text_end_id(), 2);
}

TEST(TokenizerJsonTest, MetaspaceAddsNoSpaceInFrontOfOne) {
  const Json json = Json::parse(
      "{\"pre_tokenizer\": {\"type\": \"Metaspace\", \"split\": false,"
      "  \"replacement\": \"\u2581\", \"prepend_scheme\": \"first\"},"
      " \"model\": {\"type\": \"BPE\", \"unk_token\": \"<unk>\","
      "  \"vocab\": {\"<unk>\": 0, \"\u2581\": 1, \"a\": 2, \"\u2581a\": 3},"
      "  \"merges\": [[\"\u2581\", \"a\"]]}}");
  const auto vocabulary = ReadTokenizerJson(json.dump(), "");
  PC_ASSERT_OK(vocabulary);
  const auto tokenizer = CreateTokenizer(*vocabulary);
  PC_ASSERT_OK(tokenizer);
  EXPECT_THAT((*tokenizer)->Encode("a"), ElementsAre(3));
  EXPECT_THAT((*tokenizer)->Encode(" a"), ElementsAre(3));
  EXPECT_THAT((*tokenizer)->Encode("  a"), ElementsAre(1, 3));
  EXPECT_THAT((*tokenizer)->Encode("axya"), ElementsAre(3, 0, 2));
}

}  // namespace
}  // namespace promptcache::worker
