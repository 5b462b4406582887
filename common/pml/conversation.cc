#include "common/pml/conversation.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/pml/names.h"
#include "common/status_macros.h"
#include "common/utf8.h"

namespace promptcache::pml {
namespace {

using Trim = ChatTemplate::Trim;

struct Message {
  Role role = Role::kUser;
  std::string_view content;
};

// What Python's str.strip takes away, which Jinja's trim calls.
bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 ||
         c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string_view Trimmed(std::string_view text, bool at_start, bool at_end) {
  size_t begin = text.size();
  size_t end = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = NextUtf8(text.substr(i));
    const size_t next = i + std::max<size_t>(step.num_bytes, 1);
    if (!step.valid || !IsSpace(CodePointOf(text.substr(i, next - i)))) {
      begin = std::min(begin, i);
      end = next;
    }
    i = next;
  }
  if (!at_start) begin = 0;
  if (!at_end) end = text.size();
  return begin >= end ? std::string_view() : text.substr(begin, end - begin);
}

// The messages in the template's order, with its default.
absl::StatusOr<std::vector<Message>> Arrange(
    std::span<const ChatMessage> messages, const ChatTemplate::Rules& rules) {
  std::vector<Message> out;
  for (const ChatMessage& message : messages) {
    const std::optional<Role> role = RoleOf(message.role);
    if (!role.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", message.role, "\" is no role: use system, user or assistant"));
    }
    out.push_back({.role = *role, .content = message.content});
  }
  if (rules.default_system.has_value() && !out.empty() &&
      out.front().role != Role::kSystem) {
    out.insert(out.begin(),
               {.role = Role::kSystem, .content = *rules.default_system});
  }
  if (rules.drops_empty_system) {
    std::erase_if(out, [](const Message& m) {
      return m.role == Role::kSystem && m.content.empty();
    });
  }
  if (rules.system_before_last_user && !out.empty() &&
      out.front().role == Role::kSystem) {
    const auto last =
        std::find_if(out.rbegin(), out.rend(),
                     [](const Message& m) { return m.role == Role::kUser; });
    // [system, ..., user]: the first goes to just before the last user's.
    if (last != out.rend()) {
      std::rotate(out.begin(), out.begin() + 1, last.base() - 1);
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<MarkedText> MarkConversation(
    std::span<const ChatMessage> messages, const ChatTemplate& chat_template,
    const ConversationOptions& options) {
  const ChatTemplate::Rules& rules = chat_template.rules();
  PC_ASSIGN_OR_RETURN(const std::vector<Message> arranged,
                      Arrange(messages, rules));
  MarkedText marked;
  std::optional<Role> before;
  for (const Message& message : arranged) {
    PC_ASSIGN_OR_RETURN(const Marker start,
                        chat_template.Start(before, message.role));
    marked.AppendMarkers(start);
    const Trim trim = rules.trim[static_cast<size_t>(message.role)];
    const bool continues = before == Role::kSystem &&
                           message.role == Role::kUser &&
                           rules.trims_end_only_after_system;
    marked.AppendText(Trimmed(message.content,
                              trim != Trim::kNothing && !continues,
                              trim == Trim::kBoth));
    marked.AppendMarkers(chat_template.End(message.role));
    before = message.role;
  }
  if (options.asks_for_answer) {
    PC_ASSIGN_OR_RETURN(const Marker answer, chat_template.Answer(before));
    marked.AppendMarkers(answer);
  }
  return marked;
}

}  // namespace promptcache::pml
