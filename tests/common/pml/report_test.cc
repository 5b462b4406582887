// What people and scripts read: warnings, tables, JSON, the check of cases.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/pml/borders.h"
#include "common/pml/case_check.h"
#include "common/pml/plan_json.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(ReportTest, BordersThatSplitWhatWouldHaveJoinedAreWarnedOf) {
  const auto warnings =
      SchemaOf(
          "<schema name='s'>Intro. <module name='a'>alpha</module>"
          "<union><module name='b'> beta </module><module name='c'>C"
          "</module></union>tail</schema>")
          ->BorderWarnings();
  EXPECT_THAT(warnings,
              ElementsAre(AllOf(HasSubstr("the preamble (\"Intro. \")"),
                                HasSubstr("module a (\"alpha\")"),
                                HasSubstr("the space that ends the first")),
                          HasSubstr("module b")));
  EXPECT_THAT(SchemaOf("<schema name='s'>Intro.<module name='a'> alpha"
                       "</module>\n Tail</schema>")
                  ->BorderWarnings(),
              IsEmpty());
}

TEST(ReportTest, ParamsAndMessagesHaveBordersToo) {
  EXPECT_THAT(SchemaOf("<schema name='s'><module name='a'>for <param name='p' "
                       "length='2'/></module></schema>")
                  ->BorderWarnings(),
              ElementsAre(HasSubstr("an argument of param a.p")));
  EXPECT_THAT(SchemaOf("<schema name='s'><system>S <module name='a'>A "
                       "</module></system><user>u</user></schema>")
                  ->BorderWarnings(),
              IsEmpty());  // a marker stands between
}

TEST(ReportTest, WarningsAreCounted) {
  std::string text = "<schema name='s'>";
  for (int i = 0; i < 30; ++i) {
    absl::StrAppend(&text, "<module name='m", i, "'>a </module>");
  }
  const auto warnings = SchemaOf(text + "</schema>")->BorderWarnings();
  ASSERT_THAT(warnings, SizeIs(21));
  EXPECT_EQ(warnings.back(), "9 more such borders");
}

TEST(ReportTest, ModulesOfASchema) {
  const auto modules =
      SchemaOf(
          "<schema name='s'><module name='a'>AA<module name='k' "
          "cache='false'>K</module></module>T</schema>")
          ->Modules();
  ASSERT_THAT(modules, SizeIs(3));
  EXPECT_EQ(modules[0].path, "a");
  EXPECT_EQ(modules[0].num_tokens, 2);
  EXPECT_EQ(modules[1].path, "a/k");
  EXPECT_FALSE(modules[1].cached);
  EXPECT_EQ(modules[2].path, "#1");
}

constexpr char kScaffold[] =
    "<schema name='s'><module name='a'>A</module><module name='b'>B</module>"
    "<scaffold modules='a b'/></schema>";

TEST(ReportTest, JsonIsTheFormOfTheVectors) {
  EXPECT_EQ(
      PlanToJson(PlanOf(kScaffold, "<prompt schema='s'><a/><b/>x</prompt>")),
      "{\"exactness\":\"EXACT\",\"tokens\":3,\"cached_tokens\":2,"
      "\"spans\":[{\"kind\":\"cached\",\"module\":\"a\",\"start\":0,"
      "\"tokens\":[68],\"scaffold\":\"a b\"},{\"kind\":\"cached\","
      "\"module\":\"b\",\"start\":1,\"tokens\":[69],\"scaffold\":\"a b\"}"
      ",{\"kind\":\"fresh\",\"module\":\"\",\"start\":2,\"tokens\":"
      "[123]}]}");
  EXPECT_EQ(ErrorToJson({.reason = "PML_SYNTAX",
                         .source = Source::kPrompt,
                         .place = {.line = 2}}),
            "{\"error\":{\"reason\":\"PML_SYNTAX\",\"in\":\"prompt\","
            "\"line\":2}}");
}

TEST(ReportTest, JsonForScriptsHasTheWarningsOfTheTable) {
  const Plan plan =
      PlanOf("<schema name='s'>Intro. <module name='a'>alpha</module></schema>",
             "<prompt schema='s'><a/>beta</prompt>");
  const std::string json = PlanToJson(plan, Fake());
  EXPECT_THAT(json, HasSubstr("\"warnings\":[\""));
  EXPECT_THAT(json, HasSubstr("module a (\\\"alpha\\\")"));
  EXPECT_EQ(
      PlanToJson(PlanOf(kScaffold, "<prompt schema='s'><a/></prompt>"), Fake())
          .find("warnings"),
      std::string::npos);
}

TEST(ReportTest, JsonOfAnErrorHasItsWordsAndNumbers) {
  EXPECT_EQ(ErrorToJson({.reason = "PML_ARGUMENT_TOO_LONG",
                         .source = Source::kPrompt,
                         .place = {.line = 1, .column = 9},
                         .detail = "argument 'p' has 9 tokens, 6 fit",
                         .numbers = {{"tokens", 9}, {"length", 6}}}),
            "{\"error\":{\"reason\":\"PML_ARGUMENT_TOO_LONG\",\"in\":"
            "\"prompt\",\"line\":1,\"column\":9,\"message\":\"argument 'p' "
            "has 9 tokens, 6 fit\",\"tokens\":9,\"length\":6}}");
}

TEST(ReportTest, TheTableSaysWhatAPlanIs) {
  const std::string table = PlanToTable(
      PlanOf(kScaffold, "<prompt schema='s'><a/><b/>x \n</prompt>"), Fake());
  EXPECT_THAT(table, HasSubstr("[scaffold a b]"));
  EXPECT_THAT(table, HasSubstr("(text)"));
  EXPECT_THAT(table, HasSubstr("3 tokens: 2 in modules, 1 fresh"));
  EXPECT_THAT(table, HasSubstr("EXACT"));
}

std::string CaseFile(const std::string& expect) {
  return "{\"template\":\"chatml\",\"cases\":[{\"name\":\"c\",\"schema\":"
         "\"<schema name='s'><module name='a'>A</module></schema>\","
         "\"prompt\":\"<prompt schema='s'><a/></prompt>\",\"expect\":" +
         expect + "}]}";
}

std::string DifferenceOf(const std::string& expect) {
  const auto results = CheckPmlCases(CaseFile(expect), Fake());
  EXPECT_THAT(results, IsOk());
  return results->at(0).difference;
}

TEST(ReportTest, TheCheckOfCasesFindsTheFirstDifference) {
  const std::string head =
      "{\"exactness\":\"EXACT\",\"tokens\":1,"
      "\"cached_tokens\":1,\"spans\":[";
  const std::string span = "{\"kind\":\"cached\",\"module\":\"a\",";
  EXPECT_EQ(DifferenceOf(head + span + "\"start\":0,\"tokens\":[68]}]}"), "");
  EXPECT_EQ(DifferenceOf(head + span + "\"start\":1,\"tokens\":[68]}]}"),
            "span 0, start: expected 1, is 0");
  EXPECT_EQ(DifferenceOf(head + "]}"), "number of spans: expected 0, is 1");
  EXPECT_THAT(DifferenceOf(head + span + "\"start\":0}]}"),
              HasSubstr("all of it"));
  EXPECT_THAT(DifferenceOf("{\"error\":{\"reason\":\"PML_SYNTAX\"}}"),
              HasSubstr("error: expected"));
  EXPECT_THAT(CheckPmlCases("{\"cases\":[]}", Fake()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cases")));
}

TEST(ReportTest, TheCheckOfCasesComparesPlacesThatAreGiven) {
  const std::string file =
      "{\"template\":\"chatml\",\"cases\":[{\"name\":\"c\",\"schema\":"
      "\"<schema name='s'/>\",\"prompt\":\"<prompt schema='t'/>\",\"expect\":"
      "{\"error\":{\"reason\":\"PML_UNKNOWN_SCHEMA\",\"in\":\"prompt\","
      "\"column\":7}}}]}";
  EXPECT_EQ(CheckPmlCases(file, Fake())->at(0).difference,
            "error, column: expected 7, is 1");
}

}  // namespace
}  // namespace promptcache::pml
