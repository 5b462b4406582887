#include "common/pml/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr char kSchema[] = "<schema name='s'><module name='m'/></schema>";
constexpr char kPrompt[] = "<prompt schema='s'><m/></prompt>";

void ExpectLimit(const PmlError& error, Source source, const char* what,
                 int64_t value, int64_t limit) {
  EXPECT_EQ(error.reason, "PML_LIMIT");
  EXPECT_EQ(error.source, source);
  EXPECT_EQ(error.place, Place());
  EXPECT_THAT(error.numbers,
              ElementsAre(Pair(what, value), Pair("limit", limit)));
}

std::string Nested(int modules) {
  std::string text = "<schema name='s'>";
  for (int i = 0; i < modules; ++i) text += "<module name='m'>";
  for (int i = 0; i < modules; ++i) text += "</module>";
  return text + "</schema>";
}

TEST(LimitsTest, DocumentBytes) {
  const int64_t schema_bytes = sizeof(kSchema) - 1;
  const int64_t prompt_bytes = sizeof(kPrompt) - 1;
  const Limits exact{.schema_bytes = schema_bytes,
                     .prompt_bytes = prompt_bytes};
  EXPECT_THAT(TryCompile(kSchema, kPrompt, {}, exact), IsOk());
  ExpectLimit(ErrorOf(kSchema, kPrompt, {}, {.schema_bytes = schema_bytes - 1}),
              Source::kSchema, "document bytes", schema_bytes,
              schema_bytes - 1);
  ExpectLimit(ErrorOf(kSchema, kPrompt, {}, {.prompt_bytes = prompt_bytes - 1}),
              Source::kPrompt, "document bytes", prompt_bytes,
              prompt_bytes - 1);
}

TEST(LimitsTest, BytesOfPromptsWithoutASchema) {
  const CompileOptions options{.limits = {.prompt_bytes = 5}};
  const std::vector<ChatMessage> messages = {{"user", "a"}, {"user", "b"}};
  EXPECT_THAT(CompileText("12345", Fake(), options), IsOk());
  ExpectLimit(*PmlErrorOf(CompileText("123456", Fake(), options).status()),
              Source::kPrompt, "document bytes", 6, 5);
  ExpectLimit(
      *PmlErrorOf(
          CompileMessages(messages, Fake(), ChatMl(), options).status()),
      Source::kPrompt, "document bytes", 10, 5);
}

TEST(LimitsTest, Depth) {
  EXPECT_THAT(CompileSchema(Nested(32), Fake(), ChatMl()), IsOk());
  ExpectLimit(ErrorOf(Nested(33), kPrompt), Source::kSchema, "depth", 33, 32);
}

// Far deeper than any stack: nothing here recurses with the document.
TEST(LimitsTest, AMillionLevelsAreCountedNotBuilt) {
  ExpectLimit(ErrorOf(Nested(100'000), kPrompt), Source::kSchema, "depth",
              100'000, 32);
}

TEST(LimitsTest, Modules) {
  std::string text = "<schema name='s'><union>";
  for (int i = 0; i < 2001; ++i) {
    absl::StrAppend(&text, "<module name='m", i, "'/>");
  }
  text += "</union></schema>";
  ExpectLimit(ErrorOf(text, kPrompt), Source::kSchema, "modules", 2001, 2000);
}

TEST(LimitsTest, Names) {
  const auto named = [](size_t chars) {
    return absl::StrCat("<schema name='", std::string(chars, 'n'), "'/>");
  };
  EXPECT_THAT(CompileSchema(named(128), Fake(), ChatMl()), IsOk());
  ExpectLimit(ErrorOf(named(129), kPrompt), Source::kSchema, "name characters",
              129, 128);
}

// Room in tokens adds up without running over.
TEST(LimitsTest, RoomOfAllParams) {
  const auto with_length = [](const char* length) {
    return absl::StrCat(
        "<schema name='s'><module name='m'><param name='p' "
        "length='",
        length, "'/><param name='q' length='", length, "'/></module></schema>");
  };
  EXPECT_THAT(CompileSchema(with_length("0500000"), Fake(), ChatMl()), IsOk());
  EXPECT_EQ(ErrorOf(with_length("999999999"), kPrompt).reason, "PML_LIMIT");
  EXPECT_EQ(ErrorOf(with_length("99999999999999999999"), kPrompt).reason,
            "PML_BAD_LENGTH");
}

}  // namespace
}  // namespace promptcache::pml
