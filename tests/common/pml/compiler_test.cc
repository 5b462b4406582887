#include "common/pml/compiler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kPlain[] = R"(<schema name="s">Intro. <module name="a">Alpha.
</module><module name="b">Beta.
</module></schema>)";

TEST(CompilerTest, TextBeforeBetweenAndAfterImportsIsKept) {
  EXPECT_THAT(
      Spans(PlanOf(kPlain, "<prompt schema='s'>1<b/>2<a/>3</prompt>")),
      ElementsAre("cached @0 'Intro. '", "fresh @7 '1'", "cached b@8 'Beta.\n'",
                  "fresh @14 '2'", "cached a@15 'Alpha.\n'", "fresh @22 '3'"));
}

TEST(CompilerTest, ReferencesCdataAndCommentsAreText) {
  EXPECT_EQ(TextOf(PlanOf(kPlain,
                          "<prompt schema='s'>a &lt;&amp;&gt; b<!-- no -->c"
                          "<![CDATA[<d/>&amp;]]>&#x41;</prompt>")),
            "Intro. a <&> bc<d/>&amp;A");
  EXPECT_EQ(Refusal(kPlain, "<prompt schema='s'>a & b</prompt>"),
            "PML_SYNTAX prompt 1:22");
  EXPECT_EQ(Refusal(kPlain, "<prompt schema='s'>a < b</prompt>"),
            "PML_SYNTAX prompt 1:22");
}

// The text around a comment is one piece: it is tokenised together.
TEST(CompilerTest, ACommentDoesNotSplitTokens) {
  EXPECT_EQ(PlanOf(kPlain, "<prompt schema='s'>a <!-- c -->b</prompt>")
                .spans.back()
                .tokens,
            Fake().Encode("a b"));
}

TEST(CompilerTest, ControlTokensInTextStayText) {
  const Plan plan = PlanOf(
      "<schema name='s'><system>&lt;|im_end|&gt;<module name='m'><![CDATA["
      "<|im_start|>]]><param name='p' length='20'/></module></system></schema>",
      "<prompt schema='s'><m p='&lt;|im_end|&gt;'/><user>&lt;|im_start|&gt;"
      "</user></prompt>");
  int control = 0;
  for (const PlanSpan& span : plan.spans) {
    for (const int32_t id : span.tokens) control += Fake().Decode(id).empty();
  }
  // start(system), end, start(user), end, start(assistant)
  EXPECT_EQ(control, 5);
}

TEST(CompilerTest, AMessageOfTheSchemaIsContinuedOnce) {
  const char* schema =
      "<schema name='s'><user>U<module name='a'>A</module>"
      "<module name='b'>B</module></user></schema>";
  EXPECT_EQ(TextOf(PlanOf(schema,
                          "<prompt schema='s'><user><a/>x</user>"
                          "<user><b/>y</user></prompt>")),
            "<|im_start|>user\nUAx<|im_end|>\n<|im_start|>user\nBy<|im_end|>\n"
            "<|im_start|>assistant\n");
}

TEST(CompilerTest, AnImportOutsideRolesReopensItsMessage) {
  const char* schema =
      "<schema name='s'><system>S<module name='a'>A</module></system>"
      "<user><module name='b'>B</module></user></schema>";
  EXPECT_EQ(TextOf(PlanOf(schema, "<prompt schema='s'><b/><a/></prompt>")),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"
            "<|im_start|>system\nA<|im_end|>\n<|im_start|>assistant\n");
}

TEST(CompilerTest, EachRunOfRootTextIsItsOwnAnonymousModule) {
  const char* schema =
      "<schema name='s'><system>S<module name='a'>A</module>x</system>"
      "<user>y</user><assistant>z</assistant></schema>";
  const Plan plan = PlanOf(schema, "<prompt schema='s'><a/></prompt>");
  EXPECT_EQ(TextOf(plan),
            "<|im_start|>system\nSAx<|im_end|>\n<|im_start|>user\ny<|im_end|>\n"
            "<|im_start|>assistant\nz<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(TextOf(ModuleOf(plan, "#3")), "z");
}

TEST(CompilerTest, ParamsMayStandInTheMessagesOfAModule) {
  const char* schema =
      "<schema name='s'><module name='m'><user>Q <param name='q' length='3'/>"
      "</user><assistant>R</assistant></module></schema>";
  EXPECT_EQ(TextOf(PlanOf(schema, "<prompt schema='s'><m q='xy'/></prompt>")),
            "<|im_start|>user\nQ xy<|im_end|>\n<|im_start|>assistant\nR"
            "<|im_end|>\n<|im_start|>assistant\n");
}

TEST(CompilerTest, FaultsOfModulesThatHoldMessages) {
  const auto refusal = [](const std::string& content) {
    return Refusal(absl::StrCat("<schema name='s'><module name='m'>", content,
                                "</module></schema>"),
                   "<prompt schema='s'/>");
  };
  EXPECT_EQ(refusal("<user>q</user>x"), "PML_TEXT_OUTSIDE_ROLE schema 1:18");
  EXPECT_EQ(refusal("<user>q</user><param name='p' length='1'/>"),
            "PML_TEXT_OUTSIDE_ROLE schema 1:49");
  EXPECT_EQ(refusal("<user>q</user><module name='k'>t</module>"),
            "PML_TEXT_OUTSIDE_ROLE schema 1:49");
  EXPECT_EQ(refusal("<user>q</user><union><module name='k'>t</module></union>"),
            "PML_TEXT_OUTSIDE_ROLE schema 1:56");
}

TEST(CompilerTest, FaultsOfImports) {
  const char* schema =
      "<schema name='s'><union><module name='a'>A<module name='k'>K</module>"
      "</module><module name='b'>B</module></union></schema>";
  const auto refusal = [&](const std::string& content) {
    return Refusal(schema,
                   absl::StrCat("<prompt schema='s'>", content, "</prompt>"));
  };
  EXPECT_EQ(refusal("<a/><b/>"), "PML_UNION_CONFLICT prompt 1:24");
  EXPECT_EQ(refusal("<import module='a/k'/><b/>"),
            "PML_UNION_CONFLICT prompt 1:42");
  EXPECT_EQ(refusal("<a><k/><k/></a>"), "PML_DUPLICATE_IMPORT prompt 1:27");
  EXPECT_EQ(refusal("<import module='a/k'/><a/>"),
            "PML_DUPLICATE_IMPORT prompt 1:42");
  for (const char* path : {"", "/a", "a/", "a//k", "k", "a?p", "#1", "."}) {
    EXPECT_EQ(refusal(absl::StrCat("<import module='", path, "'/>")),
              "PML_UNKNOWN_MODULE prompt 1:20")
        << path;
  }
  EXPECT_EQ(refusal("<a xml:space='no'/>"), "PML_BAD_VALUE prompt 1:20");
  EXPECT_EQ(refusal("<a module='k'/>"), "PML_UNKNOWN_PARAM prompt 1:20");
}

TEST(CompilerTest, WrongRootElements) {
  EXPECT_EQ(Refusal("<prompt/>", kPlain), "PML_UNKNOWN_ELEMENT schema 1:1");
  EXPECT_EQ(Refusal(kPlain, "\n <schema/>"), "PML_UNKNOWN_ELEMENT prompt 2:2");
  EXPECT_EQ(Refusal("", kPlain), "PML_SYNTAX schema 1:1");
  EXPECT_EQ(Refusal("<?xml version='1.0' encoding='ISO-8859-1'?><schema/>", ""),
            "PML_SYNTAX schema 1:0");
  EXPECT_EQ(Refusal("<schema name='s'>\n\xE9</schema>", ""),
            "PML_SYNTAX schema 2:1");
}

TEST(CompilerTest, ATemplateWithoutMarkersIsPlainText) {
  const auto schema = CompileSchema(
      "<schema name='s'><system>S <module name='a'>A</module></system>"
      "</schema>",
      Fake(), *ChatTemplate::FromName("plain"));
  PC_ASSERT_OK(schema);
  const auto prompt =
      ParsePrompt("<prompt schema='s'><a/><user>u</user></prompt>");
  PC_ASSERT_OK(prompt);
  EXPECT_EQ(TextOf(*Compile(**schema, **prompt)), "S Au");
}

TEST(CompilerTest, WarmPlansHaveEveryCachedModuleAndScaffold) {
  const auto schema = SchemaOf(
      "<schema name='s'>P<module name='a'>A</module><module name='b'>B</module>"
      "T<module name='n' cache='false'>N</module><scaffold modules='a b'/>"
      "</schema>");
  const auto plan = CompileWarm(*schema, {});
  PC_ASSERT_OK(plan);
  std::vector<std::string> names;
  for (const PlanModule& m : plan->modules) {
    names.push_back(m.scaffold.empty() ? m.path : m.path + " co-encoded");
  }
  EXPECT_THAT(names, ElementsAre("", "a", "b", "#1", "b co-encoded"));
  EXPECT_THAT(plan->spans, IsEmpty());
  EXPECT_EQ(plan->modules[4].context.size(), 2u);
  EXPECT_EQ(plan->modules[4].context[1].module, 1);
}

TEST(CompilerTest, WarmPlansOfNamedModulesHaveWhatTheySee) {
  const auto schema = SchemaOf(
      "<schema name='s'>P<module name='a'>A<module name='k'>K</module></module>"
      "<module name='n' cache='false'>N</module></schema>");
  const std::vector<std::string> nested = {"a/k"};
  const auto plan = CompileWarm(*schema, nested);
  PC_ASSERT_OK(plan);
  ASSERT_EQ(plan->modules.size(), 3u);
  EXPECT_EQ(plan->modules[2].path, "a/k");
  const std::vector<std::string> unknown = {"nope"};
  EXPECT_THAT(CompileWarm(*schema, unknown),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("nope")));
  const std::vector<std::string> uncached = {"n"};
  EXPECT_THAT(
      CompileWarm(*schema, uncached),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cache")));
  EXPECT_EQ(CompileWarm(*schema, nested, 3)->modules.size(), 3u);
  EXPECT_EQ(PmlErrorOf(CompileWarm(*schema, nested, 2).status())->reason,
            "PML_CONTEXT_OVERFLOW");
}

TEST(CompilerTest, PromptsWithoutASchema) {
  const FakeTokenizer with_bos({.adds_bos = true});
  const auto raw = CompileText("once <|im_end|>", with_bos);
  PC_ASSERT_OK(raw);
  EXPECT_THAT(Spans(*raw), ElementsAre("fresh @0 '<|bos|>once <|im_end|>'"));
  EXPECT_EQ(raw->num_tokens, 1 + 15);  // text stays text
  EXPECT_EQ(raw->exactness, Exactness::kExact);

  const std::vector<ChatMessage> messages = {{"system", "S"}, {"user", "U"}};
  const auto chat = CompileMessages(messages, Fake(), ChatMl());
  PC_ASSERT_OK(chat);
  EXPECT_EQ(TextOf(*chat),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_THAT(chat->modules, IsEmpty());
  const std::vector<ChatMessage> tool = {{"tool", "S"}};
  EXPECT_THAT(CompileMessages(tool, Fake(), ChatMl()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tool")));
  EXPECT_EQ(
      PmlErrorOf(CompileText("abcd", Fake(), {.context_length = 3}).status())
          ->reason,
      "PML_CONTEXT_OVERFLOW");
}

}  // namespace
}  // namespace promptcache::pml
