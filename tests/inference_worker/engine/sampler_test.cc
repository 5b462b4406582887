#include "inference_worker/engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// How often each id is drawn in `draws` steps of one sampler.
std::map<int32_t, int> Draws(const SamplingOptions& options,
                             const std::vector<float>& logits, int draws = 2000,
                             const std::vector<int32_t>& history = {}) {
  Sampler sampler(options);
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) ++counts[sampler.Sample(logits, history)];
  return counts;
}

std::set<int32_t> Drawn(const SamplingOptions& options,
                        const std::vector<float>& logits,
                        const std::vector<int32_t>& history = {}) {
  std::set<int32_t> ids;
  for (const auto& [id, count] : Draws(options, logits, 2000, history)) {
    ids.insert(id);
  }
  return ids;
}

int32_t Greedy(SamplingOptions options, const std::vector<float>& logits,
               const std::vector<int32_t>& history) {
  return Sampler(options).Sample(logits, history);
}

TEST(SamplerTest, GreedyTakesTheBestAndTheLowestIdOfATie) {
  EXPECT_EQ(Greedy({}, {1, 5, 2}, {}), 1);
  EXPECT_EQ(Greedy({}, {1, 5, 2, 5}, {}), 1);
  EXPECT_EQ(Greedy({}, {-3, -3}, {}), 0);
  EXPECT_EQ(Greedy({}, {7}, {}), 0);
}

TEST(SamplerTest, AStepInTwoPartsIsTheStep) {
  const SamplingOptions options = {
      .temperature = 1, .repetition_penalty = 3, .seed = 5};
  const std::vector<float> logits = {1, 2, 1.5f, 0.5f, 1.8f, 1.1f};
  const std::vector<int32_t> history = {4, 1, 4, 77};
  Sampler whole(options);
  Sampler parts(options);
  for (int step = 0; step < 30; ++step) {
    parts.NextChoice({});  // described and not counted
    const TokenChoice choice = parts.NextChoice(history);
    EXPECT_THAT(choice.penalized, ElementsAre(1, 4, 77));
    EXPECT_EQ(parts.Choose(logits, choice), whole.Sample(logits, history));
    parts.CountStep();
  }
}

TEST(SamplerTest, DrawsFollowTheSoftmax) {
  // Weights 1 : 2 : 5.
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};
  const auto counts = Draws({.temperature = 1, .seed = 1}, logits, 40000);
  EXPECT_NEAR(counts.at(0) / 40000.0, 0.125, 0.01);
  EXPECT_NEAR(counts.at(1) / 40000.0, 0.25, 0.01);
  EXPECT_NEAR(counts.at(2) / 40000.0, 0.625, 0.01);
}

TEST(SamplerTest, TemperatureScalesTheLogits) {
  // At temperature 2 the weights 1 : 16 become 1 : 4.
  const std::vector<float> logits = {0, std::log(16.0f)};
  const auto counts = Draws({.temperature = 2, .seed = 2}, logits, 40000);
  EXPECT_NEAR(counts.at(0) / 40000.0, 0.2, 0.01);
}

TEST(SamplerTest, ATinyTemperatureIsGreedy) {
  EXPECT_THAT(Drawn({.temperature = 1e-30f}, {1, 1.001f, 0.5f}),
              ElementsAre(1));
}

TEST(SamplerTest, TopKKeepsTheBestAndTheLowestIdsOfATie) {
  const SamplingOptions two = {.temperature = 1, .top_k = 2};
  EXPECT_THAT(Drawn(two, {0, 1, 0.9f, 0.5f}), UnorderedElementsAre(1, 2));
  EXPECT_THAT(Drawn(two, {1, 1, 1, 1}), UnorderedElementsAre(0, 1));
  EXPECT_THAT(Drawn({.temperature = 1, .top_k = 9}, {1, 1, 1}),
              UnorderedElementsAre(0, 1, 2));
}

TEST(SamplerTest, TopPKeepsTheSmallestSetThatReachesIt) {
  // Weights 0.5, 0.3, 0.2 at ids 2, 0, 1.
  const std::vector<float> logits = {std::log(0.3f), std::log(0.2f),
                                     std::log(0.5f)};
  EXPECT_THAT(Drawn({.temperature = 1, .top_p = 0.45f}, logits),
              UnorderedElementsAre(2));
  EXPECT_THAT(Drawn({.temperature = 1, .top_p = 0.55f}, logits),
              UnorderedElementsAre(0, 2));
  EXPECT_THAT(Drawn({.temperature = 1, .top_p = 0.85f}, logits),
              UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(Drawn({.temperature = 1, .top_p = 1e-6f}, logits),
              UnorderedElementsAre(2));
}

TEST(SamplerTest, TopPCountsWhatTopKLeft) {
  // Of 0.4, 0.3, 0.3 the best two remain: 0.57 and 0.43 of what is left.
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f),
                                     std::log(0.3f)};
  EXPECT_THAT(Drawn({.temperature = 1, .top_k = 2, .top_p = 0.5f}, logits),
              UnorderedElementsAre(0));
  EXPECT_THAT(Drawn({.temperature = 1, .top_p = 0.5f}, logits),
              UnorderedElementsAre(0, 1));
}

TEST(SamplerTest, MinPIsRelativeToTheBest) {
  const std::vector<float> logits = {0, std::log(0.5f), std::log(0.1f)};
  EXPECT_THAT(Drawn({.temperature = 1, .min_p = 0.2f}, logits),
              UnorderedElementsAre(0, 1));
  EXPECT_THAT(Drawn({.temperature = 1, .min_p = 0.05f}, logits),
              UnorderedElementsAre(0, 1, 2));
  EXPECT_THAT(Drawn({.temperature = 1, .min_p = 1}, logits),
              UnorderedElementsAre(0));
}

TEST(SamplerTest, ThePenaltyLowersPositiveAndNegativeLogits) {
  const SamplingOptions options = {.repetition_penalty = 2};
  EXPECT_EQ(Greedy(options, {3, 2}, {}), 0);
  EXPECT_EQ(Greedy(options, {3, 2}, {0}), 1);
  EXPECT_EQ(Greedy(options, {-2, -3}, {0}), 1);
}

TEST(SamplerTest, ThePenaltyCountsEachTokenOnce) {
  EXPECT_EQ(Greedy({.repetition_penalty = 2}, {6, 2}, {0, 0, 0, 0}), 0);
}

TEST(SamplerTest, ThePenaltySeesOnlyItsWindow) {
  SamplingOptions options = {.repetition_penalty = 2, .repetition_window = 2};
  const std::vector<float> logits = {3, 2, 0};
  EXPECT_EQ(Greedy(options, logits, {0, 2, 2}), 0);
  EXPECT_EQ(Greedy(options, logits, {2, 0, 2}), 1);
  options.repetition_window = 0;
  EXPECT_EQ(Greedy(options, logits, {0, 0, 0}), 0);
}

TEST(SamplerTest, ThePenaltyIgnoresIdsOutsideTheVocabulary) {
  EXPECT_EQ(Greedy({.repetition_penalty = 2}, {3, 2},
                   {-1, 2, std::numeric_limits<int32_t>::max()}),
            0);
}

// Against the definition, for every place that penalised ids can have.
TEST(SamplerTest, ThePenaltyOfManyIsThatOfEach) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int32_t> id_of(-2, 11);
  std::uniform_int_distribution<int> logit_of(-4, 4);  // with ties
  for (int round = 0; round < 300; ++round) {
    std::vector<float> logits(10);
    for (float& logit : logits) logit = static_cast<float>(logit_of(random));
    std::vector<int32_t> history(static_cast<size_t>(round) % 12);
    for (int32_t& id : history) id = id_of(random);
    std::vector<float> penalized = logits;
    for (int32_t id = 0; id < 10; ++id) {
      if (std::ranges::find(history, id) == history.end()) continue;
      float& logit = penalized[static_cast<size_t>(id)];
      logit = logit > 0 ? logit / 1.5f : logit * 1.5f;
    }
    const SamplingOptions greedy = {.repetition_penalty = 1.5f};
    EXPECT_EQ(Greedy(greedy, logits, history), Argmax(penalized));
    SamplingOptions drawn = {.temperature = 1, .seed = 9};
    const int32_t expected = Greedy(drawn, penalized, {});
    drawn.repetition_penalty = 1.5f;
    EXPECT_EQ(Greedy(drawn, logits, history), expected);
  }
}

TEST(SamplerTest, ThePenaltyComesBeforeTopK) {
  const SamplingOptions options = {
      .temperature = 1, .top_k = 1, .repetition_penalty = 4};
  EXPECT_THAT(Drawn(options, {3, 2}, {0}), ElementsAre(1));
}

std::vector<int32_t> Sequence(uint64_t seed, int steps = 64) {
  Sampler sampler({.temperature = 1, .seed = seed});
  const std::vector<float> logits(50, 0.0f);
  std::vector<int32_t> ids;
  for (int i = 0; i < steps; ++i) ids.push_back(sampler.Sample(logits, {}));
  return ids;
}

TEST(SamplerTest, TheSeedDecidesTheSequence) {
  EXPECT_EQ(Sequence(7), Sequence(7));
  EXPECT_NE(Sequence(7), Sequence(8));
  EXPECT_NE(Sequence(0), Sequence(1));
}

TEST(SamplerTest, AStepDrawsTheSameNumberWhateverCameBefore) {
  const std::vector<float> flat(1000, 0.0f);
  const SamplingOptions options = {.temperature = 1, .seed = 5};
  Sampler a(options);
  Sampler b(options);
  a.Sample(flat, {});
  b.Sample(std::vector<float>{1, 2, 3}, {});
  EXPECT_EQ(a.Sample(flat, {}), b.Sample(flat, {}));
}

TEST(SamplerTest, FiltersThatKeepAllDoNotChangeTheDraw) {
  const std::vector<float> logits = {0.3f, 0.1f, 0.7f, 0.2f, 0.5f};
  Sampler plain({.temperature = 1, .seed = 3});
  Sampler filtered({.temperature = 1,
                    .top_k = 5,
                    .top_p = 0.999999f,
                    .min_p = 1e-6f,
                    .seed = 3});
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(plain.Sample(logits, {}), filtered.Sample(logits, {})) << i;
  }
}

TEST(SamplerTest, NanIsNeverChosen) {
  EXPECT_EQ(Greedy({}, {kNan, 1, kNan}, {}), 1);
  EXPECT_THAT(Drawn({.temperature = 1,
                     .top_k = 2,
                     .top_p = 0.9f,
                     .min_p = 0.1f,
                     .repetition_penalty = 2},
                    {kNan, 1, 1, kNan}, {0}),
              UnorderedElementsAre(1, 2));
}

TEST(SamplerTest, ImpossibleLogitsGiveTheLowestId) {
  const SamplingOptions sampled = {
      .temperature = 1, .top_k = 2, .top_p = 0.5f, .min_p = 0.5f};
  EXPECT_EQ(Greedy({}, {kNan, kNan}, {}), 0);
  EXPECT_EQ(Greedy(sampled, {kNan, kNan}, {}), 0);
  EXPECT_EQ(Greedy(sampled, {-kInf, -kInf}, {}), 0);
  EXPECT_EQ(Greedy(sampled, {1, kInf, kInf}, {}), 1);
}

struct BadOption {
  SamplingOptions options;
  const char* field;
  const char* value;
};

TEST(SamplingOptionsTest, ErrorsNameTheFieldAndTheNumber) {
  const BadOption cases[] = {
      {{.temperature = -0.5f}, "temperature", "-0.5"},
      {{.temperature = kNan}, "temperature", "nan"},
      {{.temperature = kInf}, "temperature", "inf"},
      {{.top_p = 0}, "top_p", "0"},
      {{.top_p = 1.5f}, "top_p", "1.5"},
      {{.top_p = kNan}, "top_p", "nan"},
      {{.min_p = -1}, "min_p", "-1"},
      {{.min_p = 2}, "min_p", "2"},
      {{.min_p = kNan}, "min_p", "nan"},
      {{.repetition_penalty = 0}, "repetition_penalty", "0"},
      {{.repetition_penalty = -2}, "repetition_penalty", "-2"},
      {{.repetition_penalty = kNan}, "repetition_penalty", "nan"},
  };
  for (const BadOption& c : cases) {
    EXPECT_THAT(c.options.Validate(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(c.field), HasSubstr(c.value))));
  }
}

TEST(SamplingOptionsTest, TheDefaultsAndTheEndsOfRangesAreValid) {
  PC_EXPECT_OK(SamplingOptions{}.Validate());
  PC_EXPECT_OK(
      (SamplingOptions{.temperature = 100, .top_p = 1, .min_p = 1}).Validate());
  PC_EXPECT_OK((SamplingOptions{.top_p = 1e-9f}).Validate());
}

TEST(TopLogprobsTest, AreTheLogSoftmaxBestFirst) {
  const std::vector<float> logits = {std::log(2.0f), std::log(5.0f),
                                     std::log(3.0f)};
  EXPECT_THAT(TopLogprobs(logits, 2),
              ElementsAre(Pair(1, FloatNear(std::log(0.5f), 1e-6f)),
                          Pair(2, FloatNear(std::log(0.3f), 1e-6f))));
}

TEST(TopLogprobsTest, TiesAreInOrderOfIdsAndCountsAreClamped) {
  const auto top = TopLogprobs(std::vector<float>{1, 2, 2, 1}, 99);
  EXPECT_THAT(top, ElementsAre(Pair(1, testing::_), Pair(2, testing::_),
                               Pair(0, testing::_), Pair(3, testing::_)));
  EXPECT_THAT(TopLogprobs(std::vector<float>{1, 2}, 0), IsEmpty());
  EXPECT_THAT(TopLogprobs({}, 3), IsEmpty());
}

TEST(TopLogprobsTest, NanComesLast) {
  EXPECT_THAT(TopLogprobs(std::vector<float>{kNan, 4}, 2),
              ElementsAre(Pair(1, 0.0f), Pair(0, -kInf)));
  EXPECT_THAT(TopLogprobs(std::vector<float>{kNan, kNan}, 1),
              ElementsAre(Pair(0, -kInf)));
}

TEST(MarginTest, IsBestMinusSecond) {
  EXPECT_EQ(Margin(std::vector<float>{1, 4, 2.5f}), 1.5f);
  EXPECT_EQ(Margin(std::vector<float>{4, 1, 4}), 0);
  EXPECT_EQ(Margin(std::vector<float>{-4, -6}), 2);
  EXPECT_EQ(Margin(std::vector<float>{kNan, 4, 3}), 1);
  EXPECT_EQ(Margin(std::vector<float>{kNan, kNan}), 0);
}

TEST(ArgmaxTest, TakesTheLowestIdOfATieAndSkipsNan) {
  EXPECT_EQ(Argmax(std::vector<float>{kNan, 1, 3, 3}), 2);
  EXPECT_EQ(Argmax(std::vector<float>{kNan, kNan}), 0);
}

}  // namespace
}  // namespace promptcache::worker
