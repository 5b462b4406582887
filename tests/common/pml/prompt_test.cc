#include "common/pml/prompt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/pml/plan_json.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

constexpr char kSchema[] = R"(<schema name="s"><system>S <module name="a">A
<param name="p" length="9"/><module name="k">K</module></module></system>
<module name="d">D</module></schema>)";

StructuredPrompt Structured() {
  StructuredImport a{
      .path = "a", .arguments = {{"p", "<&> \n"}}, .imports = {{.path = "k"}}};
  StructuredMessage user{
      .role = "user",
      .items = {
          {"  1 < 2 &amp; \n "}, {StructuredImport{.path = "d"}}, {"end\n"}}};
  return {.schema = "s", .items = {{a}, {user}}};
}

TEST(PromptTest, TheStructuredFormEqualsItsPml) {
  const auto schema = SchemaOf(kSchema);
  const auto structured = MakePrompt(Structured());
  PC_ASSERT_OK(structured);
  const auto pml = ParsePrompt(
      "<prompt schema='s'><a p='&lt;&amp;&gt; &#10;'><k/></a>"
      "<user xml:space='preserve'>  1 &lt; 2 &amp;amp; \n <d/>end\n</user>"
      "</prompt>");
  PC_ASSERT_OK(pml);
  const auto plan = Compile(*schema, **structured);
  PC_ASSERT_OK(plan);
  EXPECT_EQ(PlanToJson(*plan), PlanToJson(*Compile(*schema, **pml)));
  EXPECT_THAT(TextOf(*plan),
              testing::HasSubstr("user\n  1 < 2 &amp; \n Dend\n<"));
}

TEST(PromptTest, StructuredFaultsHaveNoPlace) {
  StructuredPrompt prompt = Structured();
  std::get<StructuredImport>(prompt.items[0].item).arguments.clear();
  const auto made = MakePrompt(prompt);
  PC_ASSERT_OK(made);
  const auto error = PmlErrorOf(Compile(*SchemaOf(kSchema), **made).status());
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->reason, "PML_MISSING_ARGUMENT");
  EXPECT_EQ(error->place, Place());
}

TEST(PromptTest, StructuredRolesAreKnownOnesAndDoNotNest) {
  StructuredPrompt prompt{.schema = "s",
                          .items = {{StructuredMessage{.role = "tool"}}}};
  EXPECT_EQ(PmlErrorOf(MakePrompt(prompt).status())->reason,
            "PML_UNKNOWN_ELEMENT");
  const StructuredMessage inner{.role = "user"};
  prompt.items = {{StructuredMessage{.role = "user", .items = {{inner}}}}};
  const auto made = MakePrompt(prompt);
  PC_ASSERT_OK(made);
  EXPECT_EQ(PmlErrorOf(Compile(*SchemaOf(kSchema), **made).status())->reason,
            "PML_NESTED_ROLE");
}

TEST(PromptTest, StructuredFormHasTheSameLimits) {
  EXPECT_EQ(PmlErrorOf(MakePrompt(Structured(), {.prompt_bytes = 10}).status())
                ->reason,
            "PML_LIMIT");
  StructuredImport import{.path = "a"};
  for (int i = 0; i < 32; ++i) {
    import = {.path = "a", .imports = {import}};
  }
  const StructuredPrompt deep{.schema = "s", .items = {{import}}};
  EXPECT_EQ(PmlErrorOf(MakePrompt(deep).status())->reason, "PML_LIMIT");
}

}  // namespace
}  // namespace promptcache::pml
