#include "common/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/status_matchers.h"

namespace promptcache {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Text(const Marker& marker) {
  std::string text;
  for (const MarkerPart& part : marker) text += part.text;
  return text;
}

std::string StartOf(const ChatTemplate& chat, std::optional<Role> before,
                    Role role) {
  const auto start = chat.Start(before, role);
  return start.ok() ? Text(*start) : "refused";
}

std::string Recognised(std::string_view source) {
  const auto chat = ChatTemplate::FromJinja(source);
  return chat.ok() ? chat->name() : "unknown";
}

TEST(ChatTemplateTest, AnUnknownNameIsRefusedWithTheKnownOnes) {
  EXPECT_THAT(ChatTemplate::FromName("vicuna"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("chatml, qwen, llama2, llama3, llama3.1, "
                                 "mistral-v0, mistral-v1, mistral-v3, "
                                 "mistral-v7, gemma, phi3 or plain")));
}

TEST(ChatTemplateTest, AnUnknownSourceSaysWhatToPass) {
  EXPECT_THAT(ChatTemplate::FromJinja("{{ messages[0].content }}"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("pass --chat_template=NAME")));
}

TEST(ChatTemplateTest, Llama2PutsTheSystemIntoTheFirstUserTurn) {
  const ChatTemplate chat = *ChatTemplate::FromName("llama2");
  EXPECT_EQ(StartOf(chat, {}, Role::kUser), "[INST] ");
  EXPECT_EQ(StartOf(chat, Role::kAssistant, Role::kUser), "<s>[INST] ");
  EXPECT_EQ(StartOf(chat, {}, Role::kSystem), "[INST] <<SYS>>\n");
  EXPECT_EQ(StartOf(chat, Role::kSystem, Role::kUser), "");
  EXPECT_EQ(StartOf(chat, Role::kSystem, Role::kAssistant), "refused");
  EXPECT_FALSE(chat.Answer(Role::kSystem).ok());
}

// A module is written before it is known what comes before it.
TEST(ChatTemplateTest, ALeadMakesTheUsualStartRight) {
  const ChatTemplate chat = *ChatTemplate::FromName("llama2");
  EXPECT_EQ(Text(chat.UsualStart(Role::kUser)), "[INST] ");
  EXPECT_THAT(*chat.Lead({}, Role::kUser), IsEmpty());
  EXPECT_EQ(Text(*chat.Lead(Role::kAssistant, Role::kUser)), "<s>");
  EXPECT_THAT(chat.Lead(Role::kSystem, Role::kUser),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a module follows")));
}

TEST(ChatTemplateTest, SpellingOfTheSourceDoesNotMatter) {
  // One template, in the spellings of three authors.
  EXPECT_EQ(Recognised(
                "{% for message in messages %}{{'<|im_start|>' + "
                "message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
                "'\\n'}}{% endfor %}{{ '<|im_start|>assistant\\n' }}"),
            "chatml");
  EXPECT_EQ(
      Recognised("{%- for message in messages -%}\n  {{- \"<|im_start|>\" + "
                 "message.role + \"\\n\" + message.content + \"<|im_end|>\\n\" "
                 "}}\n{%- endfor %}{{ \"<|im_start|>assistant\\n\" }}"),
      "chatml");
  EXPECT_EQ(Recognised("{# it's ours #}{{ '<|im_start|>' + message[\"role\"] + "
                       "'\n' + message[\"content\"] + '<|im_end|>\n' }}"
                       "{{ '<|im_start|>assistant\n' }}"),
            "chatml");
}

// It has ChatML's tokens, and another form.
TEST(ChatTemplateTest, TokensAloneDoNotMakeATemplate) {
  EXPECT_EQ(Recognised("{{'<|im_start|>user<|im_sep|>' + message['content'] + "
                       "'<|im_end|><|im_start|>assistant<|im_sep|>'}}"),
            "unknown");
  EXPECT_EQ(Recognised("{{ '[INST]{' + message['content'] + '}[/INST]' }}"),
            "unknown");
  // A default that is looked for in the first message's text.
  EXPECT_EQ(
      Recognised("{% if not '<<SYS>>' in messages[0]['content'] %}{% endif %}"
                 "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
                 "{{ '<<SYS>>\\n' }}{{ ' ' + content.strip() + ' ' + "
                 "eos_token }}"),
      "unknown");
}

// Written in the form of the families' own, whose texts cannot be here.
TEST(ChatTemplateTest, FamiliesAreRecognised) {
  EXPECT_EQ(Recognised("{{ '<<SYS>>\\n' + sys + '\\n<</SYS>>\\n\\n' }}{{ "
                       "bos_token + '[INST] ' + content.strip() + ' [/INST]' "
                       "}}{{ ' '  + content.strip() + ' ' + eos_token }}"),
            "llama2");
  const std::string llama3 =
      "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
      "+ message['content'] | trim + '<|eot_id|>' }}";
  EXPECT_EQ(Recognised(llama3), "llama3");
  EXPECT_EQ(Recognised("{% set date_string = \"26 Jul 2024\" %}{{- \"Cutting "
                       "Knowledge Date: December 2023\\n\" }}{{- \"Today Date: "
                       "\" + date_string + \"\\n\\n\" }}" +
                       llama3),
            "llama3.1");
  EXPECT_EQ(Recognised("{{ '<start_of_turn>' + role + '\n' + "
                       "message['content'] | trim + '<end_of_turn>\n' }}{{"
                       "'<start_of_turn>model\n'}}"),
            "gemma");
}

TEST(ChatTemplateTest, WhatASourceSaysGoesBeforeTheFamilysHabit) {
  const auto gemma = ChatTemplate::FromJinja(
      "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
      "'<end_of_turn>\n' }}{{'<start_of_turn>model\n'}}");
  PC_ASSERT_OK(gemma);
  EXPECT_THAT(gemma->Start({}, Role::kSystem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no system messages")));
  const auto llama = ChatTemplate::FromJinja(
      "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
      "+ message['content'] + '<|eot_id|>' }}{{ '<|start_header_id|>' }}");
  PC_ASSERT_OK(llama);
  EXPECT_EQ(llama->rules().trim[0], ChatTemplate::Trim::kNothing);
}

TEST(ChatTemplateTest, AnUnfinishedSourceIsNoTrouble) {
  for (const char* source : {"{{", "{%", "{#", "{{ '", "{{ 'a\\", "{", ""}) {
    EXPECT_EQ(Recognised(source), "unknown") << source;
  }
}

}  // namespace
}  // namespace promptcache
