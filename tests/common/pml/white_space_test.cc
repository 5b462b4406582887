#include "common/pml/white_space.h"

#include <gtest/gtest.h>

#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

std::string Strip(std::string_view run) { return StripLayout(run, false); }

TEST(WhiteSpaceTest, WithoutANewlineAllIsKept) {
  EXPECT_EQ(Strip("  a\t b  "), "  a\t b  ");
  EXPECT_EQ(Strip("   "), "   ");
}

TEST(WhiteSpaceTest, LeadingLinesAndTrailingLinesGo) {
  EXPECT_EQ(Strip("\n\n  a"), "a");
  EXPECT_EQ(Strip("a \n\n \t"), "a\n");
  EXPECT_EQ(Strip(" \n \n"), "");
  EXPECT_EQ(Strip("  a\n"), "  a\n");  // no line before the first: kept
}

TEST(WhiteSpaceTest, CommonIndentationOfLinesThatBeginInTheRunGoes) {
  EXPECT_EQ(Strip("\n    a\n      b\n    c\n"), "a\n  b\nc\n");
  EXPECT_EQ(Strip("x\n    a\n  b"), "x\n  a\nb");
  EXPECT_EQ(Strip("\n\ta\n    b\n"), "\ta\n    b\n");  // nothing in common
  EXPECT_EQ(Strip("\n  a\n    \n  b\n"), "a\n\nb\n");  // blank: not counted
}

TEST(WhiteSpaceTest, TheLastNewlineOfARoleElementOrPromptGoes) {
  EXPECT_EQ(StripLayout("\n  a\n", true), "a");
  EXPECT_EQ(StripLayout("a\nb", true), "a\nb");
}

TEST(WhiteSpaceTest, OnlySpaceTabAndNewlineAreWhiteSpace) {
  EXPECT_EQ(Strip("\n\xC2\xA0\n"), "\xC2\xA0\n");
  EXPECT_EQ(Strip("\n \r \n"), "\r\n");
}

constexpr char kPreserving[] = R"(<schema name="s"><module name="m"
  xml:space="preserve">
 a
 <module name="k" xml:space="default">
   b
 </module></module></schema>)";

TEST(WhiteSpaceTest, PreserveIsInheritedUntilDefault) {
  EXPECT_EQ(TextOf(PlanOf(kPreserving,
                          "<prompt schema='s'><m><k/></m>"
                          "</prompt>")),
            "\n a\n b\n");
}

TEST(WhiteSpaceTest, IgnoredWhereNoTextMayStandEvenIfPreserved) {
  const std::string schema =
      "<schema name='s' xml:space='preserve'> <system>S</system>\n"
      "<union> <module name='a'>A</module> </union> </schema>";
  EXPECT_EQ(TextOf(PlanOf(schema,
                          "<prompt schema='s' xml:space='preserve'> "
                          "<user> <a> </a></user> </prompt>")),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n A<|im_end|>\n"
            "<|im_start|>assistant\n");
}

// The text of a schema without roles is in messages when the prompt has them:
// then white space between its modules is between messages.
TEST(WhiteSpaceTest, BetweenModulesVanishesWhereOnlyThePromptHasRoles) {
  const std::string schema =
      "<schema name='s'> <module name='a'>A</module> <module name='b'>B"
      "</module> </schema>";
  EXPECT_EQ(TextOf(PlanOf(schema, "<prompt schema='s'><a/><b/></prompt>")),
            " A B ");
  EXPECT_EQ(TextOf(PlanOf(schema,
                          "<prompt schema='s'><user><a/><b/></user></prompt>")),
            "<|im_start|>user\nAB<|im_end|>\n<|im_start|>assistant\n");
}

}  // namespace
}  // namespace promptcache::pml
