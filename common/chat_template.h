#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache {

enum class Role { kSystem, kUser, kAssistant };

std::string_view RoleName(Role role);

// One part of a marker: a control token by its exact text, or literal text.
struct MarkerPart {
  bool control = false;
  std::string text;

  friend bool operator==(const MarkerPart&, const MarkerPart&) = default;
};

using Marker = std::vector<MarkerPart>;

// What stands around the messages of a conversation. ChatML:
// Start(user) = <|im_start|> "user\n", End(user) = <|im_end|> "\n".
// A value type; PML turns parts into tokens (control parts by
// Tokenizer::ControlToken, text parts literally, joined with what is beside).
// BOS is not part of it: the tokenizer says whether a prompt begins with one.
// The space that SentencePiece puts in front of text after a control token is
// no marker either ("[INST] " of Mistral's newer templates is [INST] alone).
class ChatTemplate {
 public:
  enum class SystemPlace {
    kOwnMessage,
    kInUserMessage,  // becomes the beginning of the user message after it
    kNowhere,        // refused
  };
  enum class Trim { kNothing, kStart, kBoth };

  struct Rules {
    std::string name;
    Marker start[3];  // by Role
    Marker end[3];
    // Before the start of a user's turn that is not the first one.
    Marker again;
    // What asks for the assistant's answer.
    Marker answer;
    // Control tokens that end an answer.
    std::vector<std::string> turn_ends;
    SystemPlace system = SystemPlace::kOwnMessage;

    // Of lists of messages, which the original templates change; PML's text is
    // as its author wrote it, wherever that is.
    Trim trim[3] = {Trim::kNothing, Trim::kNothing, Trim::kNothing};
    // A user message after the system's keeps its leading white space.
    bool trims_end_only_after_system = false;
    bool drops_empty_system = false;
    bool system_before_last_user = false;
    // Where a list does not begin with a system message.
    std::optional<std::string> default_system;
  };

  ChatTemplate() = default;
  explicit ChatTemplate(Rules rules) : rules_(std::move(rules)) {}

  // By the names of KnownNames(); "plain" has no markers: role elements are
  // plain text. InvalidArgument for another name, with the list of names.
  static absl::StatusOr<ChatTemplate> FromName(std::string_view name);
  // Recognises the family from a model file's Jinja source. InvalidArgument
  // when it is unknown, saying what to pass instead.
  static absl::StatusOr<ChatTemplate> FromJinja(std::string_view source);
  // "chatml, llama2, ... or plain", for people.
  static std::string KnownNames();

  const std::string& name() const { return rules_.name; }
  const Rules& rules() const { return rules_; }

  // What begins a message of `role` after one of `before` (nullopt: it is the
  // first). InvalidArgument where the template has no place for it.
  absl::StatusOr<Marker> Start(std::optional<Role> before, Role role) const;
  // The same where it is not known what comes before: of a module that holds
  // messages.
  const Marker& UsualStart(Role role) const {
    return rules_.start[Index(role)];
  }
  // What makes of UsualStart(role) the right start after `before`, put in front
  // of it. InvalidArgument where nothing does.
  absl::StatusOr<Marker> Lead(std::optional<Role> before, Role role) const;
  const Marker& End(Role role) const { return rules_.end[Index(role)]; }
  absl::StatusOr<Marker> Answer(std::optional<Role> before) const;

 private:
  static size_t Index(Role role) { return static_cast<size_t>(role); }
  absl::Status Refuse(std::string_view what) const;

  Rules rules_;
};

}  // namespace promptcache
