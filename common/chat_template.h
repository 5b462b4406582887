#pragma once

#include <string>
#include <string_view>
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

// The markers around the messages of a conversation, per role. ChatML:
// start(user) = <|im_start|> "user\n", end(user) = <|im_end|> "\n".
// A value type; PML turns parts into tokens (control parts by
// Tokenizer::ControlToken, text parts literally, joined with what is beside).
class ChatTemplate {
 public:
  struct Markers {
    std::vector<MarkerPart> start;
    std::vector<MarkerPart> end;
  };

  // "chatml", or "plain" (no markers: role elements are plain text).
  // InvalidArgument for another name, with the list of names.
  static absl::StatusOr<ChatTemplate> FromName(std::string_view name);
  // Recognises the family from a model file's Jinja source. InvalidArgument
  // when it is unknown, saying what to pass instead.
  static absl::StatusOr<ChatTemplate> FromJinja(std::string_view source);

  const std::string& name() const { return name_; }
  const Markers& markers(Role role) const {
    return markers_[static_cast<size_t>(role)];
  }

 private:
  std::string name_;
  Markers markers_[3];
};

}  // namespace promptcache
