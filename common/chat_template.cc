#include "common/chat_template.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/strings.h"

namespace promptcache {
namespace {

constexpr size_t kSystem = static_cast<size_t>(Role::kSystem);
constexpr size_t kUser = static_cast<size_t>(Role::kUser);
constexpr size_t kAssistant = static_cast<size_t>(Role::kAssistant);

using Rules = ChatTemplate::Rules;
using SystemPlace = ChatTemplate::SystemPlace;
using Trim = ChatTemplate::Trim;

MarkerPart Control(std::string text) {
  return {.control = true, .text = std::move(text)};
}
MarkerPart Literal(std::string text) { return {.text = std::move(text)}; }

void TrimAll(Rules* rules) {
  for (Trim& trim : rules->trim) trim = Trim::kBoth;
}

Rules ChatMl() {
  Rules r;
  for (const Role role : {Role::kSystem, Role::kUser, Role::kAssistant}) {
    const auto i = static_cast<size_t>(role);
    r.start[i] = {Control("<|im_start|>"),
                  Literal(std::string(RoleName(role)) + "\n")};
    r.end[i] = {Control("<|im_end|>"), Literal("\n")};
  }
  r.answer = r.start[kAssistant];
  r.turn_ends = {"<|im_end|>"};
  return r;
}

Rules Qwen() {
  Rules r = ChatMl();
  r.default_system =
      "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";
  return r;
}

Rules Llama2() {
  Rules r;
  r.system = SystemPlace::kInUserMessage;
  r.start[kSystem] = {Literal("[INST] <<SYS>>\n")};
  r.end[kSystem] = {Literal("\n<</SYS>>\n\n")};
  r.start[kUser] = {Literal("[INST] ")};
  r.end[kUser] = {Literal(" [/INST]")};
  r.start[kAssistant] = {Literal(" ")};
  r.end[kAssistant] = {Literal(" "), Control("</s>")};
  r.again = {Control("<s>")};
  r.turn_ends = {"</s>"};
  r.trim[kUser] = Trim::kBoth;
  r.trim[kAssistant] = Trim::kBoth;
  r.trims_end_only_after_system = true;
  return r;
}

Rules Llama3() {
  Rules r;
  for (const Role role : {Role::kSystem, Role::kUser, Role::kAssistant}) {
    const auto i = static_cast<size_t>(role);
    r.start[i] = {Control("<|start_header_id|>"),
                  Literal(std::string(RoleName(role))),
                  Control("<|end_header_id|>"), Literal("\n\n")};
    r.end[i] = {Control("<|eot_id|>")};
  }
  r.answer = r.start[kAssistant];
  r.turn_ends = {"<|eot_id|>", "<|eom_id|>"};
  TrimAll(&r);
  return r;
}

// 3.1 to 3.3 put two dates in front of the system's text, in a message of its
// own where there is none. Theirs by default: today's would make every prompt
// new each day.
Rules Llama31() {
  Rules r = Llama3();
  r.start[kSystem].back().text +=
      "Cutting Knowledge Date: December 2023\n"
      "Today Date: 26 Jul 2024\n\n";
  r.default_system = "";
  return r;
}

// The first: `[INST]` is text, and there is no system message.
Rules MistralV0() {
  Rules r;
  r.system = SystemPlace::kNowhere;
  r.start[kUser] = {Literal("[INST] ")};
  r.end[kUser] = {Literal(" [/INST]")};
  r.end[kAssistant] = {Control("</s>")};
  r.turn_ends = {"</s>"};
  return r;
}

Rules MistralV1() {
  Rules r = MistralV0();
  r.system = SystemPlace::kInUserMessage;
  r.start[kSystem] = r.start[kUser];
  r.end[kSystem] = {Literal("\n\n")};
  r.start[kAssistant] = {Literal(" ")};
  return r;
}

// `[INST]` is a control token from here on.
Rules MistralV3() {
  Rules r = MistralV1();
  r.start[kSystem] = {Control("[INST]")};
  r.start[kUser] = {Control("[INST]")};
  r.end[kUser] = {Control("[/INST]")};
  r.start[kAssistant] = {};
  r.system_before_last_user = true;
  return r;
}

Rules MistralV7() {
  Rules r = MistralV3();
  r.system = SystemPlace::kOwnMessage;
  r.system_before_last_user = false;
  r.start[kSystem] = {Control("[SYSTEM_PROMPT]")};
  r.end[kSystem] = {Control("[/SYSTEM_PROMPT]")};
  return r;
}

Rules Gemma() {
  Rules r;
  r.system = SystemPlace::kInUserMessage;
  r.start[kUser] = {Control("<start_of_turn>"), Literal("user\n")};
  r.start[kAssistant] = {Control("<start_of_turn>"), Literal("model\n")};
  r.start[kSystem] = r.start[kUser];
  r.end[kUser] = {Control("<end_of_turn>"), Literal("\n")};
  r.end[kAssistant] = r.end[kUser];
  r.end[kSystem] = {Literal("\n\n")};
  r.answer = r.start[kAssistant];
  r.turn_ends = {"<end_of_turn>"};
  r.trim[kUser] = Trim::kBoth;
  r.trim[kAssistant] = Trim::kBoth;
  return r;
}

// White space after Phi-3's control tokens is part of them, line breaks of the
// template included.
Rules Phi3() {
  Rules r;
  for (const Role role : {Role::kSystem, Role::kUser, Role::kAssistant}) {
    const auto i = static_cast<size_t>(role);
    r.start[i] = {Control(absl::StrCat("<|", ToAbsl(RoleName(role)), "|>"))};
    r.end[i] = {Control("<|end|>")};
    r.trim[i] = Trim::kStart;
  }
  r.answer = r.start[kAssistant];
  r.turn_ends = {"<|end|>"};
  r.drops_empty_system = true;
  return r;
}

struct Family {
  const char* name;
  Rules (*rules)();
};

constexpr Family kFamilies[] = {
    {"chatml", ChatMl},
    {"qwen", Qwen},
    {"llama2", Llama2},
    {"llama3", Llama3},
    {"llama3.1", Llama31},
    {"mistral-v0", MistralV0},
    {"mistral-v1", MistralV1},
    {"mistral-v3", MistralV3},
    {"mistral-v7", MistralV7},
    {"gemma", Gemma},
    {"phi3", Phi3},
    {"plain", [] { return Rules(); }},
};

}  // namespace

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kSystem:
      return "system";
    case Role::kUser:
      return "user";
    case Role::kAssistant:
      return "assistant";
  }
  return "?";
}

std::string ChatTemplate::KnownNames() {
  std::string names;
  for (const Family& family : kFamilies) {
    const bool last = &family == std::end(kFamilies) - 1;
    absl::StrAppend(&names,
                    names.empty() ? ""
                    : last        ? " or "
                                  : ", ",
                    family.name);
  }
  return names;
}

absl::StatusOr<ChatTemplate> ChatTemplate::FromName(std::string_view name) {
  for (const Family& family : kFamilies) {
    if (name != family.name) continue;
    Rules rules = family.rules();
    rules.name = family.name;
    return ChatTemplate(std::move(rules));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown chat template \"", ToAbsl(name), "\": use ", KnownNames()));
}

absl::Status ChatTemplate::Refuse(std::string_view what) const {
  return absl::InvalidArgumentError(absl::StrCat(
      "the model's chat template (", rules_.name, ") ", ToAbsl(what)));
}

absl::StatusOr<Marker> ChatTemplate::Start(std::optional<Role> before,
                                           Role role) const {
  if (role == Role::kSystem && rules_.system == SystemPlace::kNowhere) {
    return Refuse(
        "has no system messages: begin the first user message with that text");
  }
  if (before == Role::kSystem && rules_.system == SystemPlace::kInUserMessage) {
    if (role == Role::kUser) return Marker();
    return Refuse(absl::StrCat(
        "puts a system message into the user message after it, and here one "
        "of the role ",
        ToAbsl(RoleName(role)), " follows"));
  }
  Marker start;
  if (before.has_value() && role != Role::kAssistant) start = rules_.again;
  const Marker& usual = UsualStart(role);
  start.insert(start.end(), usual.begin(), usual.end());
  return start;
}

absl::StatusOr<Marker> ChatTemplate::Lead(std::optional<Role> before,
                                          Role role) const {
  auto start = Start(before, role);
  if (!start.ok()) return start;
  const Marker& usual = UsualStart(role);
  if (start->size() < usual.size() ||
      !std::equal(usual.rbegin(), usual.rend(), start->rbegin())) {
    return Refuse(absl::StrCat(
        "puts a system message into the user message after it, and here a "
        "module follows that begins with a ",
        ToAbsl(RoleName(role)),
        " message of its own: put the system's text into that module, or a "
        "user message before it"));
  }
  start->resize(start->size() - usual.size());
  return start;
}

absl::StatusOr<Marker> ChatTemplate::Answer(std::optional<Role> before) const {
  if (before == Role::kSystem && rules_.system == SystemPlace::kInUserMessage) {
    return Refuse(
        "puts a system message into the user message after it, and none "
        "follows");
  }
  return rules_.answer;
}

}  // namespace promptcache
