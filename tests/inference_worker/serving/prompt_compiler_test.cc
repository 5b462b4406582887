#include "inference_worker/serving/prompt_compiler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "common/pml/error.h"
#include "inference_worker/serving/warm_plan.h"
#include "tests/inference_worker/serving/plan_builder.h"
#include "tests/support/fake_tokenizer.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// A registry that counts, changes and goes away.
class FakeSource final : public SchemaSource {
 public:
  absl::StatusOr<SchemaRecord> Fetch(const std::string& name) override {
    ++fetches;
    if (down || slow == name)
      return absl::UnavailableError("cache daemon unavailable");
    const auto it = records.find(name);
    if (it == records.end()) return absl::NotFoundError("no such schema");
    return it->second;
  }
  absl::StatusOr<std::vector<std::string>> List(uint32_t max_names) override {
    ++lists;
    if (down) return absl::UnavailableError("cache daemon unavailable");
    std::vector<std::string> names;
    for (const auto& [name, record] : records) {
      if (names.size() < max_names) names.push_back(name);
    }
    return names;
  }
  void Put(const std::string& name, const std::string& body) {
    SchemaRecord& record = records[name];
    record.name = name;
    ++record.revision;
    record.text = "<schema name=\"" + name + "\">" + body + "</schema>";
  }

  std::map<std::string, SchemaRecord> records;
  int fetches = 0;
  int lists = 0;
  bool down = false;
  std::string slow;  // a name whose Fetch fails
};

class PromptCompilerTest : public ::testing::Test {
 protected:
  PromptCompilerTest() {
    source_.Put("s",
                "Hi. <module name=\"m\">one</module>"
                "<module name=\"n\">two</module>");
    PromptCompiler::Options options;
    options.context_length = 1000;
    options.max_prompts = 3;
    options.look_again_after = absl::ZeroDuration();
    compiler_ = std::make_unique<PromptCompiler>(
        options, &tokenizer_, *ChatTemplate::FromName("chatml"), &source_);
  }
  absl::StatusOr<std::shared_ptr<const CompiledPrompt>> Pml(
      const std::string& body, const std::string& schema = "s") {
    return compiler_->Compile(
        PmlText{"<prompt schema=\"" + schema + "\">" + body + "</prompt>"},
        pml::Layout::kCompact);
  }

  FakeTokenizer tokenizer_;
  FakeSource source_;
  std::unique_ptr<PromptCompiler> compiler_;
};

TEST_F(PromptCompilerTest, KeepsSchemasAndPrompts) {
  const auto first = Pml("<m/>x");
  PC_ASSERT_OK(first);
  EXPECT_EQ((*first)->identities.size(), (*first)->plan->modules.size());
  EXPECT_EQ(*Pml("<m/>x"), *first);
  EXPECT_NE(*Pml("<m/>y"), *first);
  EXPECT_EQ(source_.fetches, 1);
}

TEST_F(PromptCompilerTest, WithoutALayoutItIsTheModelsDefault) {
  const PromptForm form = PmlText{"<prompt schema=\"s\"><n/>x</prompt>"};
  const auto prompt = compiler_->Compile(form, std::nullopt);
  PC_ASSERT_OK(prompt);
  EXPECT_EQ((*prompt)->plan->layout, pml::Layout::kCompact);

  PromptCompiler::Options options;
  options.context_length = 1000;
  options.identity.absolute_positions = true;
  PromptCompiler bound(options, &tokenizer_, *ChatTemplate::FromName("chatml"),
                       &source_);
  for (const std::optional<pml::Layout> layout :
       {std::optional<pml::Layout>(), std::optional(pml::Layout::kSchema)}) {
    const auto placed = bound.Compile(form, layout);
    PC_ASSERT_OK(placed);
    EXPECT_EQ((*placed)->plan->layout, pml::Layout::kSchema);
    EXPECT_NE((*placed)->identities.back().key,
              (*prompt)->identities.back().key);
  }
  EXPECT_THAT(bound.Compile(form, pml::Layout::kCompact),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("learned absolute positions")));
}

TEST_F(PromptCompilerTest, DropsThePromptsNotUsedForLongest) {
  const auto first = *Pml("1");
  Pml("2").status().IgnoreError();
  Pml("3").status().IgnoreError();
  EXPECT_EQ(*Pml("1"), first);
  Pml("4").status().IgnoreError();  // in place of 2
  EXPECT_EQ(*Pml("1"), first);
  Pml("5").status().IgnoreError();
  Pml("6").status().IgnoreError();
  Pml("7").status().IgnoreError();
  EXPECT_NE(*Pml("1"), first);
}

TEST_F(PromptCompilerTest, AChangedSchemaIsSeenByTheNextPrompt) {
  const auto before = *Pml("<m/>x");
  source_.Put("s", "Hello. <module name=\"m\">other</module>");
  EXPECT_EQ(*Pml("<m/>x"), before);  // nobody has said so yet
  compiler_->Invalidate("s");
  const auto after = *Pml("<m/>x");
  EXPECT_NE(after->identities[0].key, before->identities[0].key);
  source_.records.clear();
  compiler_->Invalidate("s");
  EXPECT_THAT(Pml("<m/>x"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"s\"")));
}

TEST_F(PromptCompilerTest, AnInvalidationWithoutAChangeKeepsPrompts) {
  const auto schema = (*compiler_->GetSchema("s"))->schema;
  compiler_->InvalidateAll();
  EXPECT_EQ((*compiler_->GetSchema("s"))->schema, schema);
  EXPECT_EQ(source_.fetches, 2);
}

TEST_F(PromptCompilerTest, WhatIsKnownIsServedWhileTheDaemonIsAway) {
  const auto before = *Pml("<m/>x");
  source_.down = true;
  compiler_->InvalidateAll();
  PC_EXPECT_OK(Pml("<n/>y"));
  EXPECT_THAT(Pml("x", "other"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("daemon")));
  source_.down = false;
  PC_EXPECT_OK(Pml("<m/>x"));
  const int fetches = source_.fetches;
  PC_EXPECT_OK(Pml("<m/>z"));
  EXPECT_EQ(source_.fetches, fetches);  // fresh again
}

TEST_F(PromptCompilerTest, FormsAgree) {
  pml::StructuredPrompt structured;
  structured.schema = "s";
  structured.items.push_back({pml::StructuredImport{.path = "m"}});
  structured.items.push_back({std::string("a < b")});
  const auto one = compiler_->Compile(structured, pml::Layout::kCompact);
  PC_ASSERT_OK(one);
  const auto two = *Pml("<m/>a &lt; b");
  EXPECT_EQ((*one)->plan->spans.back().tokens, two->plan->spans.back().tokens);
  EXPECT_EQ((*one)->identities[0].key, two->identities[0].key);
}

TEST_F(PromptCompilerTest, FormsOfTheSameTextAreNotTakenForEachOther) {
  const auto text =
      compiler_->Compile(PlainText{"hello"}, pml::Layout::kCompact);
  const auto messages = compiler_->Compile(
      std::vector<pml::ChatMessage>{{"user", "hello"}}, pml::Layout::kCompact);
  PC_ASSERT_OK(text);
  PC_ASSERT_OK(messages);
  EXPECT_EQ((*text)->plan->num_tokens, 5);
  EXPECT_GT((*messages)->plan->num_tokens, 5);
  EXPECT_TRUE((*text)->plan->modules.empty());
}

TEST_F(PromptCompilerTest, FaultsAreTold) {
  const auto unknown = Pml("<nope/>");
  ASSERT_TRUE(pml::PmlErrorOf(unknown.status()).has_value());
  EXPECT_EQ(pml::PmlErrorOf(unknown.status())->reason, "PML_UNKNOWN_MODULE");
  EXPECT_THAT(
      compiler_->Compile(PlainText{""}, pml::Layout::kCompact),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no tokens")));
}

TEST_F(PromptCompilerTest, TheLimitHoldsForEveryFormOfAPrompt) {
  PromptCompiler::Options options;
  options.context_length = 1000;
  options.limits.prompt_bytes = 50;
  compiler_ = std::make_unique<PromptCompiler>(
      options, &tokenizer_, *ChatTemplate::FromName("chatml"), &source_);
  const std::string text(51, 'x');
  for (const PromptForm& form :
       {PromptForm(PmlText{"<prompt schema=\"s\">" + text + "</prompt>"}),
        PromptForm(PlainText{text}),
        PromptForm(pml::StructuredPrompt{.schema = "s", .items = {{text}}}),
        PromptForm(std::vector<pml::ChatMessage>{{"user", text}})}) {
    const auto prompt = compiler_->Compile(form, std::nullopt);
    const auto error = pml::PmlErrorOf(prompt.status());
    ASSERT_TRUE(error.has_value()) << form.index() << ": " << prompt.status();
    EXPECT_EQ(error->reason, "PML_LIMIT");
    EXPECT_THAT(error->numbers, Contains(Pair("limit", 50)));
    EXPECT_THAT(error->detail, HasSubstr("document bytes"));
  }
  PC_EXPECT_OK(compiler_->Compile(PlainText{std::string(50, 'x')}, {}));
}

TEST_F(PromptCompilerTest, PoliciesAreTheModulesOwnOrTheSchemas) {
  source_.records["s"].policy.ttl = absl::Seconds(5);
  source_.records["s"].module_policies["n"] = {.pin = true};
  const auto prompt = *Pml("<m/><n/>x");
  for (size_t i = 0; i < prompt->plan->modules.size(); ++i) {
    const bool own = prompt->plan->modules[i].path == "n";
    EXPECT_EQ(prompt->policies[i].pin, own);
    EXPECT_EQ(prompt->policies[i].ttl, absl::Seconds(own ? -1 : 5));
  }
}

TEST_F(PromptCompilerTest, WarmPromptsHaveTheKeysOfRealOnes) {
  const auto prompt = *Pml("<m/>x");
  const ModulePolicy policy{.ttl = absl::Seconds(9)};
  const auto warm = compiler_->CompileWarm("s", {"m"}, &policy);
  PC_ASSERT_OK(warm);
  const CompiledPrompt& last = *warm->back();
  EXPECT_TRUE(last.plan->spans.empty());
  EXPECT_EQ(last.plan->modules.back().path, "m");
  EXPECT_EQ(last.identities.back().key, prompt->identities.back().key);
  EXPECT_EQ(last.policies.back().ttl, absl::Seconds(9));
  EXPECT_TRUE(last.replace_policy);
  EXPECT_THAT(compiler_->CompileWarm("s", {"nope"}, nullptr),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("nope")));
}

TEST_F(PromptCompilerTest, AWarmPolicyIsOfTheNamedModulesAlone) {
  source_.records["s"].policy.ttl = absl::Seconds(5);
  const ModulePolicy policy{.ttl = absl::Seconds(9)};
  for (const std::vector<std::string>& paths :
       {std::vector<std::string>{"m"}, {"", "m"}, {}}) {
    const auto warm = compiler_->CompileWarm("s", paths, &policy);
    PC_ASSERT_OK(warm);
    for (const auto& prompt : *warm) {
      // The preamble is what other modules saw, too.
      const bool preamble = prompt->plan->modules.back().path.empty();
      const bool given = !preamble || paths.size() != 1;
      EXPECT_EQ(prompt->replace_policy, given);
      EXPECT_EQ(prompt->policies.back().ttl, absl::Seconds(given ? 9 : 5));
    }
  }
  const auto warm = compiler_->CompileWarm("s", {}, nullptr);
  PC_ASSERT_OK(warm);
  for (const auto& prompt : *warm) {
    EXPECT_FALSE(prompt->replace_policy);
    EXPECT_EQ(prompt->policies.back().ttl, absl::Seconds(5));
  }
}

TEST(WarmPlanTest, AModuleGoesWithAllThatItSaw) {
  PlanBuilder b(1);
  b.AddModule({});
  b.AddModule({});
  b.AddModule({{.module = 1, .num_tokens = 1, .offset = -9}});
  b.AddModule({{.module = 2, .num_tokens = 1, .offset = -9}});
  const auto plan = b.Build();
  EXPECT_EQ(WithContext(*plan, 3), (std::vector<size_t>{1, 2, 3}));
  const pml::Plan part = ModulesOnly(*plan, {1, 2, 3});
  EXPECT_EQ(part.modules[2].context[0].module, 1);
  EXPECT_EQ(part.modules[1].context[0].module, 0);
  EXPECT_EQ(part.modules[2].pieces, plan->modules[3].pieces);
}

constexpr char kRules[] =
    "Rules of the house: nobody may smoke, shout or run in here. ";
constexpr char kMap[] = "The map shows a river, two bridges and an old mill. ";

// What prompts are kept for is bounded by what they take, however few they are.
TEST_F(PromptCompilerTest, LongPromptsPushOthersOut) {
  PromptCompiler::Options options;
  options.context_length = 1 << 20;
  options.max_prompts = 100;
  // A token of a prompt is 4 bytes in its span and 4 in its chunk.
  options.max_prompt_bytes = 3 * 8 * 10'000;
  compiler_ = std::make_unique<PromptCompiler>(
      options, &tokenizer_, *ChatTemplate::FromName("chatml"), &source_);
  const auto compile = [&](char letter) {
    std::string text;
    for (int i = 0; i < 10'000; ++i) text += {' ', letter};
    const auto prompt = compiler_->Compile(PlainText{text}, std::nullopt);
    EXPECT_THAT(prompt, IsOk());
    EXPECT_GE((*prompt)->plan->num_tokens, 10'000);
    return *prompt;
  };
  const auto a = compile('a');
  EXPECT_EQ(compile('a'), a);
  compile('b');
  compile('c');
  EXPECT_NE(compile('a'), a);
}

class TextMatchTest : public PromptCompilerTest {
 protected:
  TextMatchTest() {
    source_.Put("house", std::string("Welcome! <module name=\"rules\">") +
                             kRules + "</module><module name=\"map\">" + kMap +
                             "</module><module name=\"tiny\">no</module>");
  }
  std::shared_ptr<const CompiledPrompt> Match(
      const std::string& text, MatchMode match = MatchMode::kAuto) {
    auto prompt =
        compiler_->Compile(PlainText{text}, pml::Layout::kCompact, match);
    EXPECT_THAT(prompt, IsOk());
    return *prompt;
  }
  static std::vector<std::string> Names(const CompiledPrompt& prompt) {
    std::vector<std::string> names;
    for (const pml::PlanSpan& span : prompt.plan->spans) {
      names.push_back(span.kind == pml::SpanKind::kCached ? span.name : "text");
    }
    return names;
  }
};

TEST_F(TextMatchTest, ModulesAreFoundWhereTheyStand) {
  const auto prompt = Match(std::string("Welcome! Look: ") + kMap + "and " +
                            kRules + "So what?");
  EXPECT_EQ(prompt->plan->schema, "house");
  EXPECT_THAT(Names(*prompt),
              ElementsAre("", "text", "map", "text", "rules", "text"));
  EXPECT_EQ(prompt->plan->exactness, pml::Exactness::kModular);
  // The keys are those of a prompt that imports them.
  const auto imported = Pml("<map/><rules/>", "house");
  PC_ASSERT_OK(imported);
  for (const ModuleIdentity& id : (*imported)->identities) {
    EXPECT_THAT(prompt->identities,
                Contains(::testing::Field(&ModuleIdentity::key, id.key)));
  }
  EXPECT_EQ(prompt->chunk_tokens, 0);
}

TEST_F(TextMatchTest, WithoutItsContextAModuleIsText) {
  for (const std::string& text :
       {std::string(kMap) + "Where?", std::string("Welcome? ") + kMap}) {
    const auto prompt = Match(text);
    EXPECT_NE(prompt->plan->schema, "house") << text;
    EXPECT_EQ(prompt->chunk_tokens, 64);
  }
}

TEST_F(TextMatchTest, AnythingButTheExactTextIsText) {
  std::string changed = kMap;
  changed[10] = 'X';
  EXPECT_NE(Match("Welcome! " + changed)->plan->schema, "house");
  EXPECT_NE(Match("Welcome! no")->plan->schema, "house");  // too short
}

TEST_F(TextMatchTest, OnlyWhenItIsAskedFor) {
  const std::string text = std::string("Welcome! ") + kMap;
  EXPECT_NE(Match(text, MatchMode::kPrefix)->plan->schema, "house");
  EXPECT_NE(Match(text, MatchMode::kNone)->plan->schema, "house");
  EXPECT_EQ(Match(text)->plan->schema, "house");
}

TEST_F(TextMatchTest, AModuleTwiceIsReadOnce) {
  const auto prompt = Match(std::string("Welcome! ") + kMap + kMap);
  EXPECT_THAT(Names(*prompt), ElementsAre("", "map", "text"));
}

TEST_F(TextMatchTest, TheSchemaThatGivesMostIsTaken) {
  source_.Put("small",
              std::string("<module name=\"map\">") + kMap + "</module>");
  compiler_->InvalidateAll();
  const std::string both = std::string("Welcome! ") + kMap + kRules;
  EXPECT_EQ(Match(both)->plan->schema, "house");
  EXPECT_EQ(Match(kMap)->plan->schema, "small");
}

TEST_F(TextMatchTest, WhatPromptsOfASchemaAddIsNeverAdded) {
  source_.Put("more", std::string("Oh. <module name=\"map\">") + kMap +
                          "</module>And a text behind it.");
  source_.Put("chat", std::string("<user><module name=\"map\">") + kMap +
                          "</module></user>");
  compiler_->InvalidateAll();
  const auto more = Match(std::string("Oh. ") + kMap);
  EXPECT_EQ(more->plan->schema, "more");
  EXPECT_THAT(Names(*more), ElementsAre("", "map"));
  EXPECT_THAT(Names(*Match(kMap)), ElementsAre("text"));
}

TEST_F(TextMatchTest, ModulesAreFoundInMessages) {
  source_.Put("chat", std::string("<user>Welcome! <module name=\"map\">") +
                          kMap + "</module></user>");
  compiler_->InvalidateAll();
  const std::vector<pml::ChatMessage> chat = {
      {"user", std::string("Welcome! ") + kMap + "Where?"},
      {"assistant", "There."},
      {"user", "Sure?"}};
  const auto match = [&](MatchMode mode) {
    return *compiler_->Compile(chat, pml::Layout::kCompact, mode);
  };
  const auto prompt = match(MatchMode::kAuto);
  EXPECT_EQ(prompt->plan->schema, "chat");
  EXPECT_THAT(Names(*prompt), ElementsAre("", "map", "text"));
  EXPECT_EQ(prompt->plan->exactness, pml::Exactness::kExact);
  const auto imported = Pml("<user><map/>Where?</user>", "chat");
  PC_ASSERT_OK(imported);
  for (const ModuleIdentity& id : (*imported)->identities) {
    EXPECT_THAT(prompt->identities,
                Contains(::testing::Field(&ModuleIdentity::key, id.key)));
  }
  EXPECT_NE(match(MatchMode::kPrefix)->plan->schema, "chat");
  EXPECT_EQ(match(MatchMode::kAuto), prompt);  // kept
  source_.records.erase("chat");
  compiler_->Invalidate("chat");
  EXPECT_NE(match(MatchMode::kAuto)->plan->schema, "chat");
}

TEST_F(TextMatchTest, SchemasAreListedWhenTheyHaveChanged) {
  Match(std::string("Welcome! ") + kMap);
  Match(std::string("Welcome! ") + kRules);
  EXPECT_EQ(source_.lists, 1);
  source_.Put("new", std::string("<module name=\"r\">") + kRules + "</module>");
  compiler_->Invalidate("new");
  EXPECT_EQ(Match(std::string(kRules) + "?")->plan->schema, "new");
  EXPECT_EQ(source_.lists, 2);
  // The very text that was compiled without it, too.
  const std::string text = std::string(kRules) + "...";
  source_.records.erase("new");
  compiler_->Invalidate("new");
  EXPECT_NE(Match(text)->plan->schema, "new");
  source_.Put("new", std::string("<module name=\"r\">") + kRules + "</module>");
  compiler_->Invalidate("new");
  EXPECT_EQ(Match(text)->plan->schema, "new");
  EXPECT_EQ(source_.lists, 4);
  // Without a registry what was known goes on being found.
  source_.down = true;
  compiler_->Invalidate("other");
  EXPECT_EQ(Match(std::string(kRules) + "!")->plan->schema, "new");
}

TEST_F(TextMatchTest, ASchemaThatCouldNotBeFetchedIsLookedForAgain) {
  const std::string text = std::string("Welcome! ") + kMap;
  source_.slow = "house";
  EXPECT_NE(Match(text)->plan->schema, "house");
  // The registry has not changed meanwhile, and tells nothing.
  source_.slow.clear();
  const auto found = Match(text);
  EXPECT_EQ(found->plan->schema, "house");
  EXPECT_EQ(Match(text), found);
  EXPECT_EQ(source_.lists, 2);
}

TEST_F(TextMatchTest, ARegistryThatDidNotAnswerIsAskedAgain) {
  const std::string text = std::string("Welcome! ") + kMap;
  source_.down = true;
  EXPECT_NE(Match(text)->plan->schema, "house");
  source_.down = false;
  EXPECT_EQ(Match(text)->plan->schema, "house");
}

TEST_F(TextMatchTest, ASchemaKnownFromBeforeIsLookedAtAgain) {
  const std::string text = std::string("Welcome! ") + kMap;
  EXPECT_EQ(Match(text)->plan->schema, "house");
  source_.Put("house",
              std::string("<module name=\"r\">") + kRules + "</module>");
  compiler_->Invalidate("house");
  source_.slow = "house";
  EXPECT_EQ(Match(text)->plan->schema, "house");  // as it was
  source_.slow.clear();
  EXPECT_NE(Match(text)->plan->schema, "house");
  EXPECT_EQ(Match(std::string(kRules) + "?")->plan->schema, "house");
}

TEST_F(TextMatchTest, ASchemaThatThisModelCannotHaveKeepsNothingFromBeingKept) {
  source_.Put("odd", "<module name=\"schema\">x</module>");  // is refused
  const std::string text = std::string("Welcome! ") + kMap;
  const auto found = Match(text);
  EXPECT_EQ(found->plan->schema, "house");
  EXPECT_EQ(Match(text), found);
  EXPECT_EQ(source_.lists, 1);
}

}  // namespace
}  // namespace promptcache::worker
