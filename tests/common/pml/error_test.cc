#include "common/pml/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;

TEST(PmlErrorTest, RidesInAStatusWhole) {
  const PmlError error{.reason = "PML_ARGUMENT_TOO_LONG",
                       .source = Source::kPrompt,
                       .place = {.line = 3, .column = 17},
                       .detail = "9 tokens: \"\xE6\x9D\xB1\", 12:3",
                       .numbers = {{"tokens", 9}, {"length", -1}}};
  const absl::Status status = error.ToStatus();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("in prompt, line 3, column 17")));
  EXPECT_EQ(PmlErrorOf(status), error);
}

TEST(PmlErrorTest, MetadataHasWhatThereIs) {
  const PmlError error{.reason = "PML_LIMIT",
                       .detail = "modules: 3 is over the limit of 2",
                       .numbers = {{"modules", 3}, {"limit", 2}}};
  EXPECT_THAT(
      error.Metadata(),
      ElementsAre(Pair("source", "schema"), Pair("detail", error.detail),
                  Pair("modules", "3"), Pair("limit", "2")));
}

TEST(PmlErrorTest, OtherStatusesCarryNone) {
  EXPECT_EQ(PmlErrorOf(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(PmlErrorOf(absl::NotFoundError("PML_SYNTAX")), std::nullopt);
}

constexpr char kParams[] =
    "<schema name='s'><module name='m'>A<param name='p' length='4'/>"
    "</module></schema>";

// The unit is the model's token, and both numbers are said.
TEST(PmlErrorTest, ALongArgumentIsMeasuredInTokens) {
  EXPECT_THAT(TryCompile(kParams,
                         "<prompt schema='s'><m p='a b c d'/>"
                         "</prompt>"),
              IsOk());  // seven characters, four tokens
  const PmlError error =
      ErrorOf(kParams, "<prompt schema='s'>\n <m p='a b c d e'/></prompt>");
  EXPECT_EQ(error.reason, "PML_ARGUMENT_TOO_LONG");
  EXPECT_EQ(error.place, (Place{.line = 2, .column = 2}));
  EXPECT_THAT(error.numbers, ElementsAre(Pair("tokens", 5), Pair("length", 4)));
}

// "line:column detail" of a prompt that is not well-formed.
std::string SyntaxFault(std::string_view prompt) {
  const PmlError error = ErrorOf(kParams, prompt);
  EXPECT_EQ(error.reason, "PML_SYNTAX");
  return absl::StrCat(error.place.line, ":", error.place.column, " ",
                      error.detail);
}

TEST(PmlErrorTest, WhatWasMeantAsTextIsToldHowToBeWritten) {
  const std::string start = "<prompt schema='s'>\n";
  const auto at = [](const char* place, const char* hint) {
    return AllOf(StartsWith(place), HasSubstr(hint));
  };
  EXPECT_THAT(SyntaxFault(start + "\xC3\xA9 & b</prompt>"),
              at("2:3 ", "an & that is text is written &amp;"));
  EXPECT_THAT(SyntaxFault(start + "x &bc d</prompt>"), at("2:3 ", "&amp;"));
  EXPECT_THAT(SyntaxFault(start + "x &bc; d</prompt>"), at("2:3 ", "&amp;"));
  EXPECT_THAT(SyntaxFault(start + "<m p='R & D'/></prompt>"),
              at("2:9 ", "&amp;"));
  EXPECT_THAT(SyntaxFault(start + "1 < 2</prompt>"),
              at("2:3 ", "a < that is text is written &lt;"));
  EXPECT_THAT(SyntaxFault(start + "<m p='1<2'/></prompt>"), at("2:8 ", "&lt;"));
}

TEST(PmlErrorTest, ATruncatedDocumentNamesTheElementThatIsOpen) {
  const std::string start = "<prompt schema='s'>\n <user>Hello";
  EXPECT_THAT(SyntaxFault(start), HasSubstr("<user> of line 2, column 2"));
  EXPECT_THAT(SyntaxFault(start + "</user"),
              HasSubstr("<user> of line 2, column 2"));
  EXPECT_THAT(SyntaxFault(start + "</user>\n"),
              HasSubstr("<prompt> of line 1, column 1"));
  EXPECT_THAT(SyntaxFault(start + "</prompt>"),
              HasSubstr("<user> of line 2, column 2"));
  EXPECT_THAT(SyntaxFault(start + "</user></prompt>x"),
              Not(HasSubstr("is open")));
  EXPECT_THAT(SyntaxFault("<prompt schema='s'><m p='1' p='2'/></prompt>"),
              Not(HasSubstr("is open")));
  EXPECT_EQ(SyntaxFault(" \n"), "2:1 the document has no element");
}

TEST(PmlErrorTest, APromptWithoutASchemaIsToldWhatItNeeds) {
  const PmlError error = ErrorOf(kParams, " <prompt><m/></prompt>");
  EXPECT_EQ(error.reason, "PML_UNKNOWN_SCHEMA");
  EXPECT_EQ(error.place, (Place{.line = 1, .column = 2}));
  EXPECT_THAT(error.detail, HasSubstr("<prompt> needs a schema"));
}

TEST(PmlErrorTest, ContextOverflowSaysTheNumbers) {
  const PmlError error =
      ErrorOf(kParams, "<prompt schema='s'><m p=''/>xyz</prompt>",
              {.context_length = 3});
  EXPECT_EQ(error.reason, "PML_CONTEXT_OVERFLOW");
  EXPECT_THAT(
      error.numbers,
      ElementsAre(Pair("tokens", 4), Pair("positions", 4), Pair("context", 3)));
}

}  // namespace
}  // namespace promptcache::pml
