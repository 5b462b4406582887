// What each module saw (Plan::modules): the worker encodes from it alone, and
// module keys are made of it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/module_key.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

IdentityBase Base() {
  return {.model_fingerprint = Sha256Of("model"),
          .tokenizer_digest = Fake().digest(),
          .layout = {.num_layers = 2, .num_kv_heads = 1, .head_dim = 16}};
}

ModuleKey KeyOf(const Plan& plan, std::string_view path,
                const IdentityBase& base = Base()) {
  const std::vector<ModuleIdentity> ids = ModuleIdentities(plan, base);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (plan.modules[i].path == path) return ids[i].key;
  }
  ADD_FAILURE() << "no module " << path;
  return {};
}

TEST(ContextTest, AModuleSawThePreambleDirectlyBeforeItsBlock) {
  const Plan plan = PlanOf(
      "<schema name='s'>PRE<module name='a'>AA</module>"
      "<module name='b'>B</module></schema>",
      "<prompt schema='s'><b/><a/></prompt>");
  ASSERT_EQ(plan.modules.size(), 3u);
  EXPECT_EQ(plan.modules[0].path, "");
  EXPECT_THAT(plan.modules[0].context, IsEmpty());
  EXPECT_THAT(ContextOf(plan, "b"), ElementsAre("[0,3)@-3"));
  EXPECT_THAT(ContextOf(plan, "a"), ElementsAre("[0,3)@-3"));
  EXPECT_EQ(ModuleOf(plan, "b").schema_start, 5);
  EXPECT_EQ(ModuleOf(plan, "a").text_sha256, Sha256Of("AA"));
}

TEST(ContextTest, WithoutAPreambleARootModuleSawNothing) {
  const Plan plan =
      PlanOf("<schema name='s'><module name='a'>A</module>tail</schema>",
             "<prompt schema='s'><a/></prompt>");
  EXPECT_THAT(plan.modules[0].context, IsEmpty());
  EXPECT_THAT(ContextOf(plan, "#1"), IsEmpty());
}

constexpr char kNested[] = R"(<schema name="s">PR<module name="a">A1<param
 name="p" length="4" scaffold="ps"/>A2<module name="x">X<param name="xp"
 length="2"/></module>A3<module name="b">B1<param name="q" length="3"
 scaffold="q"/><module name="c">CCC</module>B2</module>A4</module></schema>)";

TEST(ContextTest, AChildSawItsParentsTextAndScaffoldTextsBeforeIt) {
  const Plan plan =
      PlanOf(kNested, "<prompt schema='s'><a><b><c/></b></a></prompt>");
  // a: A1@0 p@2(4) A2@6 x@8(3) A3@11 b@13 A4; b: B1@0 q@2(3) c@5 B2@8.
  EXPECT_THAT(ContextOf(plan, "a"), ElementsAre("[0,2)@-2"));
  EXPECT_THAT(ContextOf(plan, "a/b"),
              ElementsAre("[0,2)@-15", "a[0,2)@-13", "'ps'@-11", "a[2,6)@-13"));
  EXPECT_THAT(ContextOf(plan, "a/b/c"),
              ElementsAre("[0,2)@-20", "a[0,2)@-18", "'ps'@-16", "a[2,6)@-18",
                          "a/b[0,2)@-5", "'q'@-3"));
}

TEST(ContextTest, PiecesLengthsAndPlaceholdersOfAModule) {
  const Plan plan =
      PlanOf(kNested, "<prompt schema='s'><a><b><c/></b></a></prompt>");
  const PlanModule& a = ModuleOf(plan, "a");
  ASSERT_EQ(a.pieces.size(), 4u);
  EXPECT_EQ(a.pieces[0].offset, 0);
  EXPECT_EQ(a.pieces[1].offset, 6);
  EXPECT_EQ(a.pieces[2].offset, 11);
  EXPECT_EQ(a.pieces[3].offset, 23);
  EXPECT_EQ(a.length, 25);
  EXPECT_EQ(a.schema_start, 2);
  EXPECT_EQ(TextOf(a), "A1A2A3A4");
  EXPECT_EQ(a.text_sha256, Sha256Of("A1A2A3A4"));
  ASSERT_EQ(a.placeholders.size(), 1u);
  EXPECT_EQ(a.placeholders[0],
            (Piece{.offset = 2, .tokens = Fake().Encode("ps")}));
  EXPECT_EQ(ModuleOf(plan, "a/b").schema_start, 15);
  EXPECT_EQ(ModuleOf(plan, "a/b/c").schema_start, 20);
}

// The prototype's fault: states that depend on what else is imported.
TEST(ContextTest, DoesNotDependOnOtherImportsOrArguments) {
  const Plan alone =
      PlanOf(kNested, "<prompt schema='s'><import module='a/b/c'/></prompt>");
  const Plan more = PlanOf(
      kNested,
      "<prompt schema='s'>text <a p='aa'><x xp='y'/><b q='zz'><c/></b></a>"
      "</prompt>");
  for (const char* path : {"", "a", "a/b", "a/b/c"}) {
    EXPECT_EQ(KeyOf(alone, path), KeyOf(more, path)) << path;
  }
}

TEST(ContextTest, NamesOnlyModulesOfLowerIndex) {
  const Plan plan = PlanOf(
      kNested, "<prompt schema='s'><a><b><c/></b><x xp=''/></a></prompt>");
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    for (const ContextItem& item : plan.modules[i].context) {
      EXPECT_LT(item.module, static_cast<int32_t>(i));
    }
  }
}

TEST(ContextTest, TheSameModuleElsewhereHasTheSameKey) {
  const Plan first =
      PlanOf("<schema name='one'>PRE<module name='a'>AA</module></schema>",
             "<prompt schema='one'><a/>x</prompt>");
  const Plan second = PlanOf(
      "<schema name='two'>PRE<module name='b'>BBBB</module>tail"
      "<module name='other'>AA</module></schema>",
      "<prompt schema='two'><b/>text <other/></prompt>");
  EXPECT_EQ(KeyOf(first, "a"), KeyOf(second, "other"));
  EXPECT_EQ(KeyOf(first, ""), KeyOf(second, ""));
  IdentityBase absolute = Base();
  absolute.absolute_positions = true;
  EXPECT_NE(KeyOf(first, "a", absolute), KeyOf(second, "other", absolute));
}

TEST(ContextTest, AnotherPreambleIsAnotherKey) {
  const char* prompt = "<prompt schema='s'><a/>x</prompt>";
  EXPECT_NE(
      KeyOf(PlanOf("<schema name='s'>P<module name='a'>A</module></schema>",
                   prompt),
            "a"),
      KeyOf(PlanOf("<schema name='s'>Q<module name='a'>A</module></schema>",
                   prompt),
            "a"));
}

constexpr char kScaffold[] = R"(<schema name="s">PR<module name="a">AAA</module
><module name="b">BB</module><module name="c">C</module><scaffold
 modules="a b c"/></schema>)";

TEST(ContextTest, AScaffoldsMemberSawTheMembersBeforeIt) {
  const Plan plan =
      PlanOf(kScaffold, "<prompt schema='s'><a/><b/><c/></prompt>");
  EXPECT_THAT(ContextOf(plan, "a"), ElementsAre("[0,2)@-2"));
  EXPECT_THAT(ContextOf(plan, "b"), ElementsAre("[0,2)@-5", "a[0,3)@-3"));
  EXPECT_THAT(ContextOf(plan, "c"),
              ElementsAre("[0,2)@-7", "a[0,3)@-5", "b[0,2)@-2"));
  EXPECT_THAT(ModuleOf(plan, "b").scaffold, ElementsAre("a", "b", "c"));
  EXPECT_EQ(plan.exactness, Exactness::kExact);
}

TEST(ContextTest, AScaffoldsFirstMemberIsTheLoneModule) {
  const Plan together =
      PlanOf(kScaffold, "<prompt schema='s'><a/><b/><c/></prompt>");
  const Plan alone =
      PlanOf(kScaffold, "<prompt schema='s'><a/>x<b/>y<c/></prompt>");
  EXPECT_EQ(KeyOf(together, "a"), KeyOf(alone, "a"));
  EXPECT_NE(KeyOf(together, "b"), KeyOf(alone, "b"));
  EXPECT_NE(KeyOf(together, "c"), KeyOf(alone, "c"));
}

TEST(ContextTest, BosIsThePreambleOfAModelThatAddsIt) {
  const FakeTokenizer with_bos({.adds_bos = true});
  const auto schema =
      CompileSchema("<schema name='s'><module name='a'>A</module></schema>",
                    with_bos, ChatMl());
  PC_ASSERT_OK(schema);
  const auto prompt = ParsePrompt("<prompt schema='s'><a/>x</prompt>");
  PC_ASSERT_OK(prompt);
  const auto plan = Compile(**schema, **prompt);
  PC_ASSERT_OK(plan);
  EXPECT_EQ(TextOf(*plan), "<|bos|>Ax");
  EXPECT_EQ(plan->spans.front().kind, SpanKind::kCached);
  EXPECT_EQ(plan->exactness, Exactness::kExact);
  EXPECT_THAT(ContextOf(*plan, "a"), ElementsAre("[0,1)@-1"));
}

TEST(ContextTest, UncachedModulesAreSpansOnly) {
  const Plan plan = PlanOf(
      "<schema name='s'>P<module name='a' cache='false'>A"
      "<module name='b'>B</module></module></schema>",
      "<prompt schema='s'><a><b/></a></prompt>");
  ASSERT_EQ(plan.modules.size(), 1u);
  EXPECT_THAT(Spans(plan),
              ElementsAre("cached @0 'P'", "fresh a@1 'A'", "fresh a/b@2 'B'"));
}

}  // namespace
}  // namespace promptcache::pml
