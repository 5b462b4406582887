// Whatever bytes come in: an answer or an error, no crash, no hang, and what
// is answered keeps the plan's promises.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

constexpr char kSchema[] = R"(<?xml version="1.0"?>
<schema name="s"><system>Über <module name="a">A <param name="p" length="6"
 scaffold="x y"/> b<module name="k">K</module></module><union name="u">
 <module name="m1">one</module><module name="m2" cache="false">two</module>
 </union>tail</system><module name="shots"><user>q &amp; r</user><assistant>
 <![CDATA[<a>]]></assistant></module><!-- c --><module name="d">D</module>
 <module name="e">E</module><scaffold modules="d e"/></schema>)";
constexpr char kPrompt[] = R"(<prompt schema="s"><shots/><import module="a/k"/>
 <system><m2/>More.</system><user xml:space="preserve"> <d/><e/>
 &#x6771; ? </user></prompt>)";

void CheckPlan(const Plan& plan) {
  int32_t tokens = 0;
  int32_t end = 0;
  for (const PlanSpan& span : plan.spans) {
    ASSERT_GT(span.num_tokens(), 0);
    tokens += span.num_tokens();
    end = std::max(end, span.start + span.num_tokens());
    if (span.kind == SpanKind::kFresh) continue;
    const PlanModule& m = plan.modules.at(static_cast<size_t>(span.module));
    EXPECT_EQ(m.pieces.at(static_cast<size_t>(span.piece)).tokens, span.tokens);
  }
  EXPECT_EQ(tokens, plan.num_tokens);
  EXPECT_EQ(end, plan.next_position);
  for (size_t i = 0; i < plan.modules.size(); ++i) {
    EXPECT_GT(plan.modules[i].num_tokens(), 0);
    for (const ContextItem& item : plan.modules[i].context) {
      ASSERT_LT(item.module, static_cast<int32_t>(i));
      EXPECT_LT(item.offset, 0);
    }
  }
}

void Try(const std::string& schema, const std::string& prompt) {
  for (const Layout layout : {Layout::kCompact, Layout::kSchema}) {
    const auto plan = TryCompile(schema, prompt, {.layout = layout});
    if (plan.ok()) {
      CheckPlan(*plan);
    } else {
      EXPECT_TRUE(PmlErrorOf(plan.status()).has_value()) << plan.status();
    }
  }
}

TEST(RobustnessTest, EveryPrefixOfADocument) {
  ASSERT_TRUE(TryCompile(kSchema, kPrompt).ok());
  const std::string schema(kSchema);
  const std::string prompt(kPrompt);
  for (size_t n = 0; n < schema.size(); ++n) Try(schema.substr(0, n), prompt);
  for (size_t n = 0; n < prompt.size(); ++n) Try(schema, prompt.substr(0, n));
}

// Bytes, and whole pieces of markup, so that many of them still parse.
std::string Mutated(std::string text, std::mt19937* random) {
  static constexpr const char* kPieces[] = {
      "<a/>",      "<user>",
      "</user>",   "<module name='z'>",
      "</module>", "<union>",
      "<k/>",      "\n  ",
      "&amp;",     "<d/>",
      "<e/>",      " cache='false'",
      "m1",        "<?x?>",
      "\xC3",      "</union>",
      "<system/>", "<scaffold modules='e d'/>"};
  const auto below = [&](size_t n) { return (*random)() % n; };
  for (size_t i = 0, n = 1 + below(3); i < n; ++i) {
    const size_t at = below(text.size());
    switch (below(4)) {
      case 0:
        text[at] = static_cast<char>(below(256));
        break;
      case 1:
        text.insert(at, kPieces[below(std::size(kPieces))]);
        break;
      case 2:
        text.erase(at, 1 + below(12));
        break;
      default:
        text.insert(at, text.substr(below(text.size()), below(40)));
    }
  }
  return text;
}

TEST(RobustnessTest, ThousandsOfMutations) {
  std::mt19937 random(20261130);
  for (int i = 0; i < 4000; ++i) {
    if (i % 2 == 0) {
      Try(Mutated(kSchema, &random), kPrompt);
    } else {
      Try(kSchema, Mutated(kPrompt, &random));
    }
  }
}

// Work and memory grow with the document, not with its square.
TEST(RobustnessTest, LargeHostileDocuments) {
  std::string params = "<schema name='s'><module name='m'>";
  for (int i = 0; i < 50'000; ++i) {
    absl::StrAppend(&params, "<param name='p", i,
                    "' length='1' scaffold='x'/>");
  }
  for (int i = 0; i < 1900; ++i) {
    absl::StrAppend(&params, "<module name='c", i, "'>C</module>");
  }
  Try(params + "</module></schema>",
      "<prompt schema='s'><import module='m/c1899'/></prompt>");

  std::string roles = "<schema name='s'><system><module name='a'>A</module>";
  absl::StrAppend(&roles, "</system>");
  for (int i = 0; i < 50'000; ++i) roles += "<user>u</user>";
  Try(roles + "</schema>", "<prompt schema='s'><a/></prompt>");

  std::string import = "<prompt schema='s'><m ";
  for (int i = 0; i < 50'000; ++i) absl::StrAppend(&import, "p", i, "='x' ");
  Try(params + "</module></schema>", import + "/></prompt>");
}

}  // namespace
}  // namespace promptcache::pml
