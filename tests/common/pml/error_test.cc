#include "common/pml/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

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
