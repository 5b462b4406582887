#include "common/pml/conversation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/pml/conversation_check.h"
#include "tests/common/pml/pml_fixture.h"
#include "tests/support/test_files.h"

namespace promptcache::pml {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ChatTemplate Named(const char* name) { return *ChatTemplate::FromName(name); }

std::string TextOfList(const std::vector<ChatMessage>& messages,
                       const ChatTemplate& chat) {
  const auto marked = MarkConversation(messages, chat);
  return marked.ok() ? marked->Text() : std::string(marked.status().message());
}

TEST(ConversationTest, EveryRenderedConversationHolds) {
  const auto results = CheckConversations(
      ReadFileOrDie(TestDataPath("chat_template/parts.json")), nullptr);
  PC_ASSERT_OK(results);
  EXPECT_EQ(results->size(), 280u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

TEST(ConversationTest, ADifferenceIsToldAndAnotherFormRefused) {
  const auto results = CheckConversations(
      R"({"conversations": {"u": [{"role": "user", "content": "a"}]},
          "chat_templates": [{"family": "f", "name": "plain", "cases": [
            {"conversation": "u", "asks": true, "parts": [["t", "b"]]},
            {"conversation": "u", "asks": true, "refused": true},
            {"conversation": "u", "asks": true, "ids": [1]}]},
            {"family": "g", "name": "none", "cases": []}]})",
      nullptr);
  PC_ASSERT_OK(results);
  std::vector<std::string> differences;
  for (const CaseResult& r : *results) differences.push_back(r.difference);
  EXPECT_THAT(
      differences,
      ElementsAre(R"(expected [["t","b"]], is [["t","a"]])",
                  "expected to be refused", "it has ids: name a vocabulary",
                  HasSubstr("unknown chat template \"none\"")));
  EXPECT_FALSE(CheckConversations("{}", nullptr).ok());
  EXPECT_FALSE(CheckConversations("[", nullptr).ok());
}

TEST(ConversationTest, ASystemMessageWithoutAUserMessageIsRefused) {
  EXPECT_THAT(TextOfList({{"system", "S"}}, Named("gemma")),
              HasSubstr("none follows"));
  EXPECT_THAT(
      TextOfList({{"system", "S"}, {"assistant", "A"}}, Named("llama2")),
      HasSubstr("one of the role assistant follows"));
}

TEST(ConversationTest, TextThatIsNotUtf8IsTrimmedLikeAnyOther) {
  EXPECT_EQ(TextOfList({{"user", " \xFF \xE3\x80\x80\xE3"}}, Named("gemma")),
            "<start_of_turn>user\n\xFF \xE3\x80\x80\xE3<end_of_turn>\n"
            "<start_of_turn>model\n");
}

// A template with everything that depends on what comes before, all in text.
ChatTemplate Contextual() {
  ChatTemplate::Rules rules;
  rules.name = "contextual";
  rules.system = ChatTemplate::SystemPlace::kInUserMessage;
  rules.start[0] = {{.text = "[S="}};
  rules.end[0] = {{.text = ";"}};
  rules.start[1] = {{.text = "["}};
  rules.end[1] = {{.text = "]"}};
  rules.start[2] = {{.text = " "}};
  rules.end[2] = {{.text = "."}};
  rules.again = {{.text = "+"}};
  rules.answer = {{.text = "?"}};
  return ChatTemplate(rules);
}

std::string TextOfPml(const std::string& content, const std::string& prompt,
                      const CompileOptions& options = {}) {
  const auto schema =
      CompileSchema(absl::StrCat("<schema name='s'>", content, "</schema>"),
                    Fake(), Contextual());
  if (!schema.ok()) return std::string(schema.status().message());
  const auto parsed =
      ParsePrompt(absl::StrCat("<prompt schema='s'>", prompt, "</prompt>"));
  if (!parsed.ok()) return std::string(parsed.status().message());
  const auto plan = Compile(**schema, **parsed, options);
  return plan.ok() ? TextOf(*plan) : std::string(plan.status().message());
}

TEST(ConversationTest, PmlPutsTheSystemWhereTheTemplateHasIt) {
  EXPECT_EQ(TextOfPml("<system>S</system><user>R<module name='d'>D</module>"
                      "</user>",
                      "<user><d/>Q</user>"),
            "[S=S;RDQ]?");
  EXPECT_EQ(TextOfPml("<system>S</system><module name='d'>D</module>",
                      "<user><d/>Q</user><assistant>A</assistant>"
                      "<user>R</user>"),
            "[S=S;DQ] A.+[R]?");
}

TEST(ConversationTest, PmlRefusesASystemMessageThatNoUserMessageFollows) {
  EXPECT_THAT(TextOfPml("<system>S</system>", ""), HasSubstr("none follows"));
  EXPECT_THAT(TextOfPml("<system>S</system><assistant>A</assistant>", ""),
              HasSubstr("one of the role assistant follows"));
  EXPECT_EQ(PmlErrorOf(CompileSchema("<schema name='s'><module name='m'>"
                                     "<system>S</system><system>T</system>"
                                     "</module></schema>",
                                     Fake(), Contextual())
                           .status())
                ->reason,
            "PML_CHAT_TEMPLATE");
}

constexpr char kShots[] =
    "<module name='a'><user>1</user><assistant>2</assistant></module>"
    "<module name='b'><user>3</user><assistant>4</assistant></module>";

TEST(ConversationTest, WhatAModulesFirstMessageLacksStandsBeforeIt) {
  EXPECT_EQ(TextOfPml(kShots, "<b/><a/><user>Q</user>"), "[3] 4.+[1] 2.+[Q]?");
  EXPECT_EQ(TextOfPml(kShots, "<user>Q</user><a/>"), "[Q]+[1] 2.?");
  EXPECT_THAT(TextOfPml(absl::StrCat("<system>S</system>", kShots), "<a/>"),
              HasSubstr("a module follows that begins with a user message"));
}

TEST(ConversationTest, TheLayoutSchemaHasRoomForWhatStandsBeforeAModule) {
  const auto schema =
      CompileSchema(absl::StrCat("<schema name='s'>", kShots, "</schema>"),
                    Fake(), Contextual());
  PC_ASSERT_OK(schema);
  const auto prompt = ParsePrompt("<prompt schema='s'><a/><b/></prompt>");
  PC_ASSERT_OK(prompt);
  const auto plan = Compile(**schema, **prompt, {.layout = Layout::kSchema});
  PC_ASSERT_OK(plan);
  EXPECT_THAT(Spans(*plan),
              ElementsAre("cached a@1 '[1] 2.'", "fresh @7 '+'",
                          "cached b@8 '[3] 4.'", "fresh @14 '?'"));
}

TEST(ConversationTest, MessagesInsideAModuleFollowWhatIsKnownToBeBefore) {
  const char* known =
      "<module name='a'><user>1</user><assistant>2</assistant><module name='k'>"
      "<user>3</user><assistant>4</assistant></module><user>5</user></module>";
  EXPECT_EQ(TextOfPml(known, "<a><k/></a>"), "[1] 2.+[3] 4.+[5]?");
  EXPECT_EQ(TextOfPml(known, "<a/>"), "[1] 2.+[5]?");
  const char* unknown =
      "<module name='a'><union><module name='k'><user>3</user><assistant>4"
      "</assistant></module><module name='l'><system>S</system></module>"
      "</union><user>5</user></module>";
  EXPECT_EQ(TextOfPml(unknown, "<a/>"), "[5]?");
  EXPECT_EQ(TextOfPml(unknown, "<user>Q</user><a/>"), "[Q]+[5]?");
  EXPECT_THAT(TextOfPml(unknown, "<a><k/></a>"),
              HasSubstr("keep these messages in modules of the root"));
  EXPECT_THAT(TextOfPml(unknown, "<a><l/></a>"),
              HasSubstr("keep these messages in modules of the root"));
}

}  // namespace
}  // namespace promptcache::pml
