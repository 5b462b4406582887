#include "inference_worker/serving/prefix_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/module_key.h"
#include "common/pml/exactness.h"
#include "tests/inference_worker/serving/plan_builder.h"

namespace promptcache::worker {
namespace {

pml::Plan Plain(const std::vector<int32_t>& tokens) {
  PlanBuilder builder(1);
  builder.PlaceFresh(0, tokens);
  return *builder.Build();
}

std::vector<int32_t> Tokens(int32_t count, uint32_t seed = 1) {
  return PlanBuilder(seed).Tokens(count);
}

std::vector<ModuleIdentity> Keys(const pml::Plan& plan) {
  return ModuleIdentities(plan, {});
}

TEST(CutPrefixTest, WholeChunksAreModulesAndTheLastTokenIsFresh) {
  for (const int32_t length : {1, 63, 64, 65, 128, 129, 300}) {
    const std::vector<int32_t> tokens = Tokens(length);
    pml::Plan plan = Plain(tokens);
    ASSERT_TRUE(CutPrefix(&plan)) << length;
    EXPECT_EQ(plan.modules.size(), static_cast<size_t>((length - 1) / 64));
    std::vector<int32_t> joined;
    for (const pml::PlanSpan& span : plan.spans) {
      EXPECT_EQ(span.start, static_cast<int32_t>(joined.size()));
      EXPECT_FALSE(span.tokens.empty());
      joined.insert(joined.end(), span.tokens.begin(), span.tokens.end());
    }
    EXPECT_EQ(joined, tokens);
    EXPECT_EQ(plan.spans.back().kind, pml::SpanKind::kFresh);
    EXPECT_EQ(plan.num_cached_tokens, (length - 1) / 64 * 64);
    EXPECT_EQ(plan.num_tokens, length);
    EXPECT_EQ(pml::ExactnessOf(plan), pml::Exactness::kExact) << length;
  }
}

// One item a chunk, not one a pair of them.
TEST(CutPrefixTest, ChunksShareOneContext) {
  pml::Plan plan = Plain(Tokens(64 * 40 + 1));
  ASSERT_TRUE(CutPrefix(&plan));
  ASSERT_EQ(plan.modules.size(), 40u);
  const pml::ContextList& last = plan.modules.back().context;
  pml::ContextWalk walk;
  size_t items = 0;
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    const pml::ContextList& context = plan.modules[i].context;
    ASSERT_EQ(context.size(), i);
    for (size_t j = 0; j < i; ++j) {
      EXPECT_EQ(context[j].module, static_cast<int32_t>(j));
      EXPECT_EQ(context[j].num_tokens, 64);
    }
    if (i > 0) {
      EXPECT_EQ(context.begin(), last.begin());
    }
    items += walk.New(context).size();
  }
  EXPECT_EQ(items, 39u);
}

TEST(CutPrefixTest, LeavesOtherPlansAlone) {
  for (const auto& plan : {PlanBuilder::Random(1), PlanBuilder::Exact(2)}) {
    pml::Plan copy = *plan;
    EXPECT_FALSE(CutPrefix(&copy));
    EXPECT_EQ(copy.spans.size(), plan->spans.size());
    EXPECT_EQ(copy.modules.size(), plan->modules.size());
  }
}

TEST(CutPrefixTest, KeysAreTheTokensUpToThere) {
  const std::vector<int32_t> tokens = Tokens(400);
  pml::Plan whole = Plain(tokens);
  ASSERT_TRUE(CutPrefix(&whole));
  // Another end changes no key before it.
  pml::Plan shorter = Plain({tokens.begin(), tokens.begin() + 200});
  ASSERT_TRUE(CutPrefix(&shorter));
  const auto a = Keys(whole), b = Keys(shorter);
  ASSERT_EQ(b.size(), 3u);
  for (size_t i = 0; i < b.size(); ++i) {
    EXPECT_EQ(a[i].key, b[i].key);
    EXPECT_EQ(whole.modules[i].path, shorter.modules[i].path);
  }
  // Another token changes its chunk's and all after it.
  std::vector<int32_t> other = tokens;
  other[100] = (other[100] + 1) % 60;
  pml::Plan changed = Plain(other);
  ASSERT_TRUE(CutPrefix(&changed));
  const auto c = Keys(changed);
  EXPECT_EQ(c[0].key, a[0].key);
  for (size_t i = 1; i < a.size(); ++i) {
    EXPECT_NE(c[i].key, a[i].key);
    EXPECT_NE(changed.modules[i].path, whole.modules[i].path);
  }
}

TEST(PrefixModulesTest, AreThoseOfTheCutPlan) {
  const std::vector<int32_t> tokens = Tokens(300);
  pml::Plan cut = Plain(tokens);
  ASSERT_TRUE(CutPrefix(&cut));
  pml::Plan all;
  all.modules = PrefixModules(tokens, 4);
  const auto a = Keys(cut), b = Keys(all);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].key, b[i].key);
}

}  // namespace
}  // namespace promptcache::worker
