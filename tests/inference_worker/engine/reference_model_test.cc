#include "tests/support/reference_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tests/support/gguf_writer.h"
#include "tests/support/reference_plan.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using Seen = ReferenceModel::Seen;
using Logits = std::vector<std::vector<double>>;

std::unique_ptr<ReferenceModel> Tiny(const TinyLlamaSpec& spec = {}) {
  TempDir dir;
  const std::string path = dir.path() + "/tiny.gguf";
  WriteTinyLlama(path, spec);
  auto file = OpenModelFile(path, {});
  PC_EXPECT_OK(file);
  auto model = ReferenceModel::Create(**file);
  PC_EXPECT_OK(model);
  return *std::move(model);
}

std::vector<int32_t> Ids(size_t count, int32_t first = 3) {
  std::vector<int32_t> ids(count);
  for (size_t i = 0; i < count; ++i) {
    ids[i] = (first + static_cast<int32_t>(i) * 37) % 300;
  }
  return ids;
}

double MaxDifference(const Logits& a, const Logits& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) {
      most = std::max(most, std::abs(a[i][j] - b[i][j]));
    }
  }
  return most;
}

TEST(ReferenceModelTest, AStateSeenInPlaceIsTheSameAsATokenBefore) {
  const auto model = Tiny();
  const std::vector<int32_t> ids = Ids(9);
  const auto all = model->Run(TokensAt(ids, 0), {});
  const auto head = model->Run(TokensAt({ids.data(), 5}, 0), {});
  const Seen seen = Seen::All(head.states, 0);
  const auto tail = model->Run(TokensAt({ids.data() + 5, 4}, 5), {&seen, 1});
  EXPECT_LT(
      MaxDifference({all.logits.begin() + 5, all.logits.end()}, tail.logits),
      1e-12);
}

TEST(ReferenceModelTest, OnlyDistancesMatter) {
  const auto model = Tiny();
  const auto here = model->Run(TokensAt(Ids(6), 0), {});
  const auto there = model->Run(TokensAt(Ids(6), 1000), {});
  const auto spread = model->Run(TokensAt(Ids(6), -3), {});
  EXPECT_LT(MaxDifference(here.logits, there.logits), 1e-9);
  EXPECT_LT(MaxDifference(here.logits, spread.logits), 1e-9);
}

TEST(ReferenceModelTest, DistanceAndVisibilityDoMatter) {
  const auto model = Tiny();
  const auto head = model->Run(TokensAt(Ids(5), 0), {});
  const std::vector<int32_t> last = {42};
  const Seen near = Seen::All(head.states, 0);
  const Seen far = Seen::All(head.states, -7);
  const auto a = model->Run(TokensAt(last, 5), {&near, 1});
  const auto b = model->Run(TokensAt(last, 5), {&far, 1});
  const auto c = model->Run(TokensAt(last, 5), {});
  EXPECT_GT(MaxDifference(a.logits, b.logits), 1e-3);
  EXPECT_GT(MaxDifference(a.logits, c.logits), 1e-3);
}

TEST(ReferencePlanTest, AChainOfSegmentsIsAFullPrefill) {
  const auto model = Tiny({.tied_embeddings = false});
  const std::vector<int32_t> ids = Ids(12);
  const auto all = model->Run(TokensAt(ids, 0), {});
  const std::span<const int32_t> s(ids);
  const auto part = [&](size_t first, size_t count) {
    const auto p = s.subspan(first, count);
    return std::vector<int32_t>(p.begin(), p.end());
  };
  const ReferenceSegment segments[] = {
      {.tokens = part(0, 4), .encode_start = 0},
      {.tokens = part(4, 5), .encode_start = 4, .context = {0}}};
  const ReferenceItem items[] = {{.segment = 0, .start = 0},
                                 {.segment = 1, .start = 4},
                                 {.tokens = part(9, 3), .start = 9}};
  EXPECT_LT(MaxDifference({all.logits.begin() + 9, all.logits.end()},
                          RunReferencePlan(*model, segments, items)),
            1e-12);
}

pml::Plan PlanOfTwoModules() {
  pml::Plan plan;
  plan.modules.resize(2);
  plan.modules[0].pieces = {{0, Ids(4)}};
  plan.modules[1].context = {
      {.module = 0, .first_token = 0, .num_tokens = 4, .offset = -4}};
  plan.modules[1].pieces = {{0, Ids(3, 8)}, {5, Ids(2, 9)}};
  plan.modules[1].placeholders = {{3, Ids(2, 10)}};
  plan.spans = {
      {.kind = pml::SpanKind::kCached,
       .module = 0,
       .piece = 0,
       .start = 0,
       .tokens = Ids(4)},
      {.kind = pml::SpanKind::kCached,
       .module = 1,
       .piece = 0,
       .start = 4,
       .tokens = Ids(3, 8)},
      {.kind = pml::SpanKind::kFresh, .start = 7, .tokens = Ids(2, 11)},
      {.kind = pml::SpanKind::kCached,
       .module = 1,
       .piece = 1,
       .start = 9,
       .tokens = Ids(2, 9)}};
  return plan;
}

// What the plan above means, said once more by hand.
TEST(ReferencePlanTest, PlaceholdersAreSeenAndNotKept) {
  const auto model = Tiny();
  const auto base = model->Run(TokensAt(Ids(4), 0), {});
  std::vector<int32_t> sequence = Ids(3, 8);
  for (const int32_t id : Ids(2, 10)) sequence.push_back(id);
  for (const int32_t id : Ids(2, 9)) sequence.push_back(id);
  const Seen context = Seen::All(base.states, -4);
  const auto module = model->Run(TokensAt(sequence, 0), {&context, 1});

  const Seen before[] = {Seen::All(base.states, 0), {&module.states, 0, 3, 4}};
  const auto argument = model->Run(TokensAt(Ids(2, 11), 7), before);
  const Seen all[] = {before[0],
                      before[1],
                      Seen::All(argument.states, 0),
                      {&module.states, 5, 1, 4}};
  const std::vector<int32_t> last = {Ids(2, 9).back()};
  const auto end = model->Run(TokensAt(last, 10), all);

  const Logits logits = RunReferencePlan(*model, PlanOfTwoModules());
  ASSERT_EQ(logits.size(), 3u);
  EXPECT_LT(MaxDifference({logits[0], logits[1]}, argument.logits), 1e-12);
  EXPECT_LT(MaxDifference({logits[2]}, end.logits), 1e-12);
}

// Others computed these values (float32): the oracle is one of a real model.
TEST(ReferenceModelSlowTest, AgreesWithPublishedLogitsOfTheRealModel) {
  if (SmolLm2Path().empty()) GTEST_SKIP() << "the real model is not there";
  auto file = OpenModelFile(SmolLm2Path(), {});
  PC_ASSERT_OK(file);
  auto model =
      ReferenceModel::Create(**file, ReferenceModel::Weights::kAsStored);
  PC_ASSERT_OK(model);
  const auto json = nlohmann::json::parse(
      ReadFileOrDie(TestDataPath("smollm2/vectors.json")));
  const auto& chat = json["vectors"][4];
  ASSERT_EQ(chat["name"], "chat-capital");
  const auto ids = chat["ids"].get<std::vector<int32_t>>();
  const auto result = (*model)->Run(TokensAt(ids, 0), {});
  for (size_t i = 0; i < chat["top_last"]["ids"].size(); ++i) {
    const auto id = chat["top_last"]["ids"][i].get<size_t>();
    EXPECT_NEAR(result.logits.back()[id],
                chat["top_last"]["logits"][i].get<double>(), 2e-3);
  }
}

}  // namespace
}  // namespace promptcache::worker
