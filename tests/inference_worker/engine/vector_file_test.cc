#include "inference_worker/engine/vector_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Published(const char* file) {
  return Json::parse(
      ReadFileOrDie(TestDataPath(std::string("smollm2/") + file)));
}

TEST(VectorFileTest, ReadsThePublishedFiles) {
  auto plain = ParseVectorFile(Published("vectors.json").dump());
  PC_ASSERT_OK(plain);
  ASSERT_EQ(plain->size(), 8u);
  EXPECT_EQ((*plain)[4].name, "chat-capital");
  EXPECT_EQ((*plain)[4].plan.at(0).fresh.size(), 28u);
  EXPECT_EQ((*plain)[4].nll.size(), 27u);
  EXPECT_EQ((*plain)[4].greedy_ids.size(), 24u);
  auto modular = ParseVectorFile(Published("modular.json").dump());
  PC_ASSERT_OK(modular);
  ASSERT_EQ(modular->size(), 8u);
  const VectorCase& chain = (*modular)[6];
  EXPECT_EQ(chain.name, "nested-chain-exact");
  EXPECT_THAT(chain.segments.at(2).context, ElementsAre(0u, 1u));
  EXPECT_EQ(chain.plan.at(1).segment, 1u);
  EXPECT_EQ(chain.plan.at(3).start, 112);
  EXPECT_EQ(chain.logsumexp.back(), chain.last_logsumexp);
}

Json OfTinyModel(const char* model, const char* file) {
  return Json::parse(
      ReadFileOrDie(TestDataPath(std::string("models/") + model + "/" + file)));
}

TEST(VectorFileTest, ReadsTheFilesOfAModelFolder) {
  auto plain =
      ParseVectorFile(OfTinyModel("tiny-mistral", "vectors.json").dump());
  PC_ASSERT_OK(plain);
  ASSERT_EQ(plain->size(), 6u);
  EXPECT_EQ((*plain)[2].name, "input 2");
  EXPECT_EQ((*plain)[2].plan.at(0).fresh.size(), 33u);
  EXPECT_EQ((*plain)[2].logsumexp.size(), 33u);
  EXPECT_EQ((*plain)[2].last_logits.size(), 384u);
  EXPECT_EQ((*plain)[4].greedy_ids.size(), 24u);
  // One run of positions after the other, 44 tokens in all.
  const VectorCase& gaps = (*plain)[5];
  EXPECT_EQ(gaps.name, "positions_test");
  ASSERT_EQ(gaps.plan.size(), 2u);
  EXPECT_EQ(gaps.plan[0].fresh.size() + gaps.plan[1].fresh.size(), 44u);
  EXPECT_GT(
      gaps.plan[1].start,
      gaps.plan[0].start + static_cast<int32_t>(gaps.plan[0].fresh.size()));
  EXPECT_EQ(gaps.logsumexp.back(), gaps.last_logsumexp);

  auto modular =
      ParseVectorFile(OfTinyModel("tiny-mistral", "modular.json").dump());
  PC_ASSERT_OK(modular);
  ASSERT_EQ(modular->size(), 13u);
  EXPECT_EQ((*modular)[11].name, "empty_fresh_between");
  EXPECT_EQ((*modular)[11].plan.size(), 3u);
}

TEST(VectorFileTest, ReadsAnEncoderDecodersFiles) {
  auto plain =
      ParseVectorFile(OfTinyModel("later/tiny-t5", "vectors.json").dump());
  PC_ASSERT_OK(plain);
  ASSERT_EQ(plain->size(), 5u);
  const VectorCase& first = (*plain)[1];
  EXPECT_EQ(first.plan.at(0).fresh.size(), 7u);
  EXPECT_THAT(first.decoder_ids, ElementsAre(0, 50, 3, 180, 167));
  EXPECT_EQ(first.argmax.size(), 5u);
  EXPECT_EQ(first.encoder_last.size(), 64u);
  EXPECT_EQ(first.greedy_ids.size(), 24u);

  auto modular =
      ParseVectorFile(OfTinyModel("later/tiny-t5", "modular.json").dump());
  PC_ASSERT_OK(modular);
  const VectorCase& alone = modular->at(1);
  EXPECT_EQ(alone.name, "one_segment");
  EXPECT_EQ(alone.plan.size(), 1u);
  EXPECT_TRUE(alone.plan[0].segment.has_value());
  EXPECT_EQ(alone.logsumexp.size(), alone.decoder_ids.size());
}

TEST(VectorFileTest, RefusesAnEncoderDecodersFileWithoutDecoderTokens) {
  Json json = OfTinyModel("later/tiny-t5", "vectors.json");
  json["decoder_inputs"].erase(4);
  EXPECT_THAT(ParseVectorFile(json.dump()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a file of logit vectors")));
  json = OfTinyModel("later/tiny-t5", "modular.json");
  json["cases"][1]["decoder_ids"].erase(0);
  EXPECT_THAT(ParseVectorFile(json.dump()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("case one_segment: 6 fresh tokens with 7")));
}

TEST(VectorFileTest, RefusesGreedyTokensOfAnInputThatIsNotThere) {
  Json json = OfTinyModel("tiny-mistral", "vectors.json");
  json["greedy"][0]["prompt_index"] = 9;
  EXPECT_THAT(ParseVectorFile(json.dump()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("greedy of no input")));
}

TEST(VectorFileTest, RefusesWhatIsNotSuchAFile) {
  for (const char* text :
       {"", "[", "{}", "{\"vectors\": [{}]}", "{\"cases\": [{\"name\": 3}]}"}) {
    EXPECT_THAT(ParseVectorFile(text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("not a file of logit vectors")))
        << text;
  }
}

struct Damage {
  const char* field;  // a JSON pointer into the case three-modules
  Json value;
  const char* message;
};

TEST(VectorFileTest, NamesTheCaseThatDoesNotHoldTogether) {
  const Damage damages[] = {
      {"/segments/1/context", {1}, "segment 1 sees segment 1"},
      {"/segments/0/ids", Json::array(), "segment 0 has no ids"},
      {"/plan/0/segment", 4, "names no segment"},
      {"/plan/4/fresh", Json::array(), "holds no tokens"},
      {"/plan/4", {{"segment", 0}, {"start", 240}}, "does not end in fresh"},
      {"/fresh_argmax", {1}, "18 fresh tokens with 1 argmax"},
      {"/fresh_logsumexp", {1.0}, "1 log-sum-exps"},
      {"/top_last/ids", {1}, "different lengths"},
  };
  for (const Damage& damage : damages) {
    Json json = Published("modular.json");
    json["cases"][2][Json::json_pointer(damage.field)] = damage.value;
    EXPECT_THAT(ParseVectorFile(json.dump()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("case three-modules"),
                               HasSubstr(damage.message))))
        << damage.field;
  }
}

}  // namespace
}  // namespace promptcache::worker
