#pragma once

#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/pml/marked_text.h"

namespace promptcache::pml {

struct ChatMessage {
  std::string role;  // system, user, assistant; InvalidArgument for another
  std::string content;
};

struct ConversationOptions {
  bool asks_for_answer = true;
};

// A list of messages as the model's own chat template renders it: unlike PML,
// which takes text as it is written, with its trimming, its default system
// message and its place for the system's text. Without BOS. InvalidArgument
// for a list that the template has no form for.
absl::StatusOr<MarkedText> MarkConversation(
    std::span<const ChatMessage> messages, const ChatTemplate& chat_template,
    const ConversationOptions& options = {});

}  // namespace promptcache::pml
