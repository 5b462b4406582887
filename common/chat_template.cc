#include "common/chat_template.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/strings.h"

namespace promptcache {

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

absl::StatusOr<ChatTemplate> ChatTemplate::FromName(std::string_view name) {
  ChatTemplate t;
  t.name_ = std::string(name);
  if (name == "plain") return t;
  if (name == "chatml") {
    for (Role role : {Role::kSystem, Role::kUser, Role::kAssistant}) {
      Markers& m = t.markers_[static_cast<size_t>(role)];
      m.start = {{.control = true, .text = "<|im_start|>"},
                 {.text = std::string(RoleName(role)) + "\n"}};
      m.end = {{.control = true, .text = "<|im_end|>"}, {.text = "\n"}};
    }
    return t;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown chat template \"", ToAbsl(name), "\": use chatml or plain"));
}

absl::StatusOr<ChatTemplate> ChatTemplate::FromJinja(std::string_view source) {
  if (source.find("<|im_start|>") != std::string_view::npos &&
      source.find("<|im_end|>") != std::string_view::npos) {
    return FromName("chatml");
  }
  return absl::InvalidArgumentError(
      "the model file's chat template is not one of those known here: pass "
      "--chat_template=chatml or --chat_template=plain");
}

}  // namespace promptcache
