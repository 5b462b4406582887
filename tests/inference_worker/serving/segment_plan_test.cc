#include "inference_worker/serving/segment_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace promptcache::worker {
namespace {

using pml::Exactness;
using pml::Plan;
using pml::SpanKind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Module 0 is only seen by module 1, of two pieces; module 2 saw module 1.
Plan ThreeModules() {
  Plan plan;
  plan.modules.resize(3);
  plan.modules[0].path = "seen";
  plan.modules[0].pieces = {{0, {1, 2}}};
  plan.modules[1].path = "first";
  plan.modules[1].context = {{.module = 0, .num_tokens = 2, .offset = -2}};
  plan.modules[1].pieces = {{0, {3}}, {4, {4, 5}}};
  plan.modules[2].path = "second";
  plan.modules[2].context = {{.module = 1, .num_tokens = 3, .offset = -6},
                             {.offset = -9, .tokens = {9}}};
  plan.modules[2].pieces = {{0, {6}}};
  plan.spans = {{SpanKind::kCached, "second", 2, 0, 0, {6}},
                {SpanKind::kCached, "first", 1, 0, 1, {3}},
                {SpanKind::kFresh, "first.param", -1, -1, 2, {7, 8}},
                {SpanKind::kCached, "first", 1, 1, 5, {4, 5}}};
  plan.num_tokens = 6;
  plan.next_position = 7;
  plan.exactness = Exactness::kExact;
  return plan;
}

TEST(SegmentPlanTest, AModuleSeesNothingAndOnlyThoseOfSpansAreLeft) {
  Plan plan = ThreeModules();
  SeparateSegments(-1, &plan);
  ASSERT_EQ(plan.modules.size(), 2u);
  for (const pml::PlanModule& module : plan.modules) {
    EXPECT_THAT(module.context, IsEmpty());
  }
  EXPECT_EQ(plan.modules[0].path, "first");
  EXPECT_EQ(plan.spans[0].module, 1);
  EXPECT_EQ(plan.spans[1].module, 0);
  EXPECT_EQ(plan.spans[2].module, -1);
  EXPECT_EQ(plan.spans[3].module, 0);
  EXPECT_EQ(plan.exactness, Exactness::kModular);
  EXPECT_EQ(plan.spans.size(), 4u);
  EXPECT_EQ(plan.num_tokens, 6);
}

TEST(SegmentPlanTest, APlanWithoutSpansKeepsItsModules) {
  Plan plan = ThreeModules();
  plan.spans.clear();
  SeparateSegments(2, &plan);
  EXPECT_EQ(plan.modules.size(), 3u);
  EXPECT_THAT(plan.modules[2].context, IsEmpty());
  EXPECT_THAT(plan.spans, IsEmpty());
}

TEST(SegmentPlanTest, AnEndStandsAloneAfterAModule) {
  Plan plan = ThreeModules();
  SeparateSegments(2, &plan);
  ASSERT_EQ(plan.spans.size(), 5u);
  EXPECT_EQ(plan.spans[4].kind, SpanKind::kFresh);
  EXPECT_EQ(plan.spans[4].start, 7);
  EXPECT_THAT(plan.spans[4].tokens, ElementsAre(2));
  EXPECT_EQ(plan.num_tokens, 7);
  EXPECT_EQ(plan.next_position, 8);
}

TEST(SegmentPlanTest, FreshSpansAreOneTextThatItEnds) {
  Plan plan;
  plan.spans = {{.start = 0, .tokens = {5}}, {.start = 9, .tokens = {6, 7}}};
  plan.num_tokens = 3;
  plan.next_position = 11;
  SeparateSegments(2, &plan);
  EXPECT_EQ(plan.exactness, Exactness::kExact);
  ASSERT_EQ(plan.spans.size(), 2u);
  EXPECT_THAT(plan.spans[1].tokens, ElementsAre(6, 7, 2));
  EXPECT_EQ(plan.num_tokens, 4);
}

TEST(SegmentPlanTest, OneModuleIsExactWhenItIsOneText) {
  Plan plan = ThreeModules();
  plan.spans = {{SpanKind::kCached, "second", 2, 0, 0, {6}}};
  Plan ended = plan;
  SeparateSegments(-1, &plan);
  EXPECT_EQ(plan.exactness, Exactness::kExact);
  SeparateSegments(2, &ended);
  EXPECT_EQ(ended.exactness, Exactness::kModular);

  plan.modules[0].placeholders = {{3, {9}}};
  SeparateSegments(-1, &plan);
  EXPECT_EQ(plan.exactness, Exactness::kModular);
}

}  // namespace
}  // namespace promptcache::worker
