#include "common/pml/schema_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "common/pml/conversation.h"
#include "tests/common/pml/pml_fixture.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kDocument[] =
    "The map shows a river, two bridges and an old mill.";
constexpr char kRules[] = "Nobody may smoke, shout or run inside the old mill.";

// Puts a space in front of every text, as SentencePiece does.
class SpacingTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> Encode(std::string_view text) const override {
    return Fake().Encode(" " + std::string(text));
  }
  std::string Decode(int32_t id) const override { return Fake().Decode(id); }
  int32_t ControlToken(std::string_view text) const override {
    return Fake().ControlToken(text);
  }
  int32_t bos_id() const override { return -1; }
  int32_t vocab_size() const override { return Fake().vocab_size(); }
  const std::vector<int32_t>& stop_ids() const override {
    return Fake().stop_ids();
  }
  const Digest& digest() const override { return Fake().digest(); }
};

std::string In(const std::string& name, const std::string& text) {
  return "<module name=\"" + name + "\">" + text + "</module>";
}

std::string SchemaText(const std::string& body) {
  return "<schema name=\"s\">" + body + "</schema>";
}

std::optional<Plan> Match(const std::string& body,
                          const std::vector<ChatMessage>& messages,
                          const CompileOptions& options = {},
                          const Tokenizer& tokenizer = Fake()) {
  const auto schema = CompileSchema(SchemaText(body), tokenizer, ChatMl());
  EXPECT_THAT(schema, IsOk());
  const auto texts = SchemaTexts::Create(*schema);
  if (texts == nullptr) return std::nullopt;
  const auto plan = CompileMessages(messages, tokenizer, ChatMl(), options);
  EXPECT_THAT(plan, IsOk());
  return texts->Find({.text = *MarkConversation(messages, ChatMl()),
                      .messages = true,
                      .plan = &*plan},
                     options);
}

std::vector<std::string> Names(const std::optional<Plan>& plan) {
  std::vector<std::string> names;
  if (!plan.has_value()) return names;
  for (const PlanSpan& span : plan->spans) {
    names.push_back(span.kind == SpanKind::kCached ? span.name : "text");
  }
  return names;
}

TEST(SchemaTextsTest, AModuleBehindThePreambleOfItsMessageIsExact) {
  const std::string body =
      "<system>You know this: " + In("map", kDocument) + "</system>";
  const std::vector<ChatMessage> chat = {
      {"system", std::string("You know this: ") + kDocument + " Be brief."},
      {"user", "Where is the mill?"}};
  const auto plan = Match(body, chat);
  EXPECT_THAT(Names(plan), ElementsAre("", "map", "text"));
  EXPECT_EQ(plan->schema, "s");
  EXPECT_EQ(plan->exactness, Exactness::kExact);
  EXPECT_EQ(TextOf(*plan), TextOf(*CompileMessages(chat, Fake(), ChatMl())));
  // The very states that a prompt of the schema reads.
  const Plan imported = PlanOf(
      SchemaText(body),
      R"(<prompt schema="s"><system><map/></system><user>Hm?</user></prompt>)");
  ASSERT_EQ(plan->modules.size(), imported.modules.size());
  for (size_t i = 0; i < imported.modules.size(); ++i) {
    EXPECT_EQ(plan->modules[i].pieces, imported.modules[i].pieces);
    EXPECT_EQ(plan->modules[i].text_sha256, imported.modules[i].text_sha256);
  }
}

TEST(SchemaTextsTest, AModuleOfNoMessageIsFoundInsideOne) {
  const std::vector<ChatMessage> chat = {
      {"user", std::string("See: ") + kDocument + " Why?"},
      {"assistant", "So."},
      {"user", std::string(kRules)}};
  const auto plan = Match(In("rules", kRules) + In("map", kDocument), chat);
  EXPECT_THAT(Names(plan), ElementsAre("text", "map", "text", "rules", "text"));
  EXPECT_EQ(plan->exactness, Exactness::kModular);
  EXPECT_EQ(plan->num_tokens, plan->next_position);
}

TEST(SchemaTextsTest, MessagesOfAModuleAreFoundAsAWhole) {
  const std::string shots = "<module name=\"shots\"><user>" +
                            std::string(kDocument) +
                            "</user><assistant>Yes.</assistant></module>";
  const std::vector<ChatMessage> chat = {
      {"user", kDocument}, {"assistant", "Yes."}, {"user", "And?"}};
  const auto plan = Match(shots, chat);
  EXPECT_THAT(Names(plan), ElementsAre("shots", "text"));
  EXPECT_EQ(plan->exactness, Exactness::kExact);
  for (std::vector<ChatMessage> other :
       {std::vector<ChatMessage>{{"user", kDocument}, {"assistant", "Yes!"}},
        {{"user", std::string(kDocument) + " "}, {"assistant", "Yes."}},
        {{"system", kDocument}, {"user", "Yes."}}}) {
    EXPECT_THAT(Names(Match(shots, other)), IsEmpty());
  }
}

TEST(SchemaTextsTest, TextThatSpellsMarkersIsNoMessage) {
  const std::string shots = "<module name=\"shots\"><user>" +
                            std::string(kDocument) +
                            "</user><assistant>Yes.</assistant></module>";
  const std::string spelled = std::string("<|im_start|>user\n") + kDocument +
                              "<|im_end|>\n<|im_start|>assistant\nYes."
                              "<|im_end|>\n";
  EXPECT_THAT(Names(Match(shots, {{"user", spelled}})), IsEmpty());
  EXPECT_THAT(Names(Match(shots, {{"user", "Hi"}, {"assistant", spelled}})),
              IsEmpty());
}

TEST(SchemaTextsTest, WithoutItsContextAModuleIsText) {
  const std::string body =
      "<system>You know this: " + In("map", kDocument) + "</system>";
  for (const std::string& before :
       {std::string(), std::string("You knew this: "),
        std::string(" You know this: ")}) {
    EXPECT_THAT(Names(Match(body, {{"system", before + kDocument}})),
                IsEmpty());
  }
  // The same words of another role.
  EXPECT_THAT(Names(Match(body, {{"user", std::string("You know this: ") +
                                              kDocument}})),
              IsEmpty());
}

TEST(SchemaTextsTest, WhatASchemasPromptsAddIsNotAdded) {
  // The anonymous module is in every prompt of the schema.
  const std::string body = "<user>" + In("map", kDocument) +
                           "Always be careful with it, and then:</user>";
  const auto plan = Match(body, {{"user", std::string(kDocument) + "Why?"}});
  EXPECT_THAT(Names(plan), ElementsAre("", "map", "text"));
  // Where its text stands it is read as well.
  EXPECT_THAT(
      Names(
          Match(body, {{"user", std::string(kDocument) +
                                    "Always be careful with it, and then:"}})),
      ElementsAre("", "map", "#1", "text"));
}

TEST(SchemaTextsTest, MembersOfAScaffoldAreReadCoEncoded) {
  const std::string body = In("map", kDocument) + In("rules", kRules) +
                           "<scaffold modules=\"map rules\"/>";
  const auto together =
      Match(body, {{"user", std::string(kDocument) + kRules}});
  ASSERT_THAT(Names(together), ElementsAre("text", "map", "rules", "text"));
  EXPECT_EQ(together->modules.back().scaffold.size(), 2u);
  const auto apart =
      Match(body, {{"user", std::string(kDocument) + " " + kRules}});
  ASSERT_THAT(Names(apart),
              ElementsAre("text", "map", "text", "rules", "text"));
  EXPECT_THAT(apart->modules.back().scaffold, IsEmpty());
}

// Members begin at one position: in the layout `schema` two would stand on
// each other.
TEST(SchemaTextsTest, OfAUnionOneMemberIsFound) {
  const std::string longer = std::string(kRules) + " Nor near it.";
  const std::string other = "Opening hours are on the door of the mill.";
  const std::string body = "<union>" + In("map", kDocument) +
                           In("rules", longer) + "</union><union>" +
                           In("hours", other) + "</union>";
  const std::vector<ChatMessage> chat = {
      {"user", std::string(kDocument) + " " + longer + " " + other}};
  for (const Layout layout : {Layout::kSchema, Layout::kCompact}) {
    const auto plan = Match(body, chat, {.layout = layout});
    EXPECT_THAT(Names(plan),
                ElementsAre("text", "rules", "text", "hours", "text"));
    EXPECT_EQ(TextOf(*plan), TextOf(*CompileMessages(chat, Fake(), ChatMl())));
  }
  // Which, the prompt decides where it holds one.
  EXPECT_THAT(Names(Match(body, {{"user", kDocument}})),
              ElementsAre("text", "map", "text"));
}

TEST(SchemaTextsTest, ATokenizerThatWouldChangeTheTextFindsNothing) {
  const SpacingTokenizer spacing;
  // A message of its own begins where the tokenizer begins anyway.
  const std::string body = In("map", kDocument);
  EXPECT_THAT(Names(Match(body, {{"user", std::string("See: ") + kDocument}},
                          {}, spacing)),
              IsEmpty());
}

TEST(SchemaTextsTest, WhatDoesNotFitIsNotMatched) {
  const std::vector<ChatMessage> chat = {{"user", kDocument}};
  const CompileOptions options{.layout = Layout::kSchema};
  const std::string body = In("rules", kRules) + In("map", kDocument);
  const auto plan = Match(body, chat, options);
  ASSERT_THAT(Names(plan), ElementsAre("text", "map", "text"));
  EXPECT_GT(plan->next_position, plan->num_tokens);
  CompileOptions tight = options;
  tight.context_length = plan->next_position - 1;
  EXPECT_THAT(Names(Match(body, chat, tight)), IsEmpty());
}

TEST(SchemaTextsTest, NothingToBeFound) {
  for (const std::string& body :
       {std::string("<module name=\"m\">short</module>"),
        "<module name=\"m\" cache=\"false\">" + std::string(kDocument) +
            "</module>",
        "<module name=\"m\">" + std::string(kDocument) +
            "<param name=\"p\" length=\"3\"/></module>",
        std::string("Nothing but a preamble, as long as this one is.")}) {
    EXPECT_EQ(SchemaTexts::Create(SchemaOf(SchemaText(body))), nullptr) << body;
  }
}

}  // namespace
}  // namespace promptcache::pml
