#include "tools/cli/prompt_flags.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"

namespace promptcache::cli {
namespace {

// A PML document begins with a tag; anything else is a question.
bool LooksLikePml(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  return first != std::string::npos && text[first] == '<';
}

absl::Status AddMessage(const std::string& given, v1::Messages* messages) {
  const size_t colon = given.find(':');
  const std::string role = given.substr(0, colon);
  if (colon == std::string::npos ||
      (role != "system" && role != "user" && role != "assistant")) {
    return UsageError(absl::StrCat("--message ", given,
                                   ": write ROLE:TEXT, where the role is "
                                   "system, user or assistant"));
  }
  v1::Message* message = messages->add_messages();
  message->set_role(role);
  message->set_content(given.substr(colon + 1));
  return absl::OkStatus();
}

}  // namespace

void PromptFlags::AddTo(CLI::App* command) {
  command->add_option(
      "prompt", file_,
      "a file with the prompt; - is standard input, which is also read when "
      "nothing is given and it is not a terminal. Text that begins with < is "
      "PML, other text is sent as the user's message");
  command->add_option("--pml", pml_file_, "a file with a PML prompt, always");
  command->add_option("--text", text_,
                      "a raw completion: the model continues this text");
  command
      ->add_option("--message", messages_,
                   "ROLE:TEXT, one message of a chat; repeatable")
      ->allow_extra_args(false);
  command
      ->add_option("--layout", layout_,
                   "where modules are placed: compact, or schema (at the "
                   "positions they have there)")
      ->check(CLI::IsMember({"compact", "schema"}))
      ->capture_default_str();
}

absl::StatusOr<v1::Prompt> PromptFlags::Prompt() const {
  const int given = int{!file_.empty()} + int{!pml_file_.empty()} +
                    int{text_.has_value()} + int{!messages_.empty()};
  if (given > 1) {
    return UsageError(
        "more than one prompt: give a file, --pml, --text or --message");
  }
  v1::Prompt prompt;
  if (!messages_.empty()) {
    for (const std::string& message : messages_) {
      auto status = AddMessage(message, prompt.mutable_messages());
      if (!status.ok()) return status;
    }
    return prompt;
  }
  if (text_.has_value()) {
    if (text_->empty()) return UsageError("the prompt is empty: --text \"\"");
    prompt.set_text(*text_);
    return prompt;
  }
  if (given == 0 && ::isatty(STDIN_FILENO) == 1) {
    return UsageError(
        "no prompt: give a file, --pml FILE, --text TEXT or --message "
        "user:TEXT; promptcache generate --help says more");
  }
  auto text = ReadFile(!pml_file_.empty() ? pml_file_
                       : file_.empty()    ? "-"
                                          : file_);
  // Who types a question where a file is meant is told how to ask it.
  if (absl::IsNotFound(text.status()) && !file_.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no file ", file_,
                     "; a question itself goes with --message user:TEXT, "
                     "text to be continued with --text TEXT"));
  }
  if (!text.ok()) return text.status();
  if (!pml_file_.empty() || LooksLikePml(*text)) {
    prompt.set_pml(*text);
  } else {
    v1::Message* message = prompt.mutable_messages()->add_messages();
    message->set_role("user");
    // The newline that ends a line of a file is not part of a question.
    while (!text->empty() && (text->back() == '\n' || text->back() == '\r')) {
      text->pop_back();
    }
    if (text->empty()) {
      return UsageError(
          absl::StrCat("the prompt is empty: ",
                       file_.empty() || file_ == "-" ? "standard input" : file_,
                       " has no text"));
    }
    message->set_content(*text);
  }
  return prompt;
}

v1::PlanLayout PromptFlags::layout() const {
  return layout_ == "schema" ? v1::PLAN_LAYOUT_SCHEMA : v1::PLAN_LAYOUT_COMPACT;
}

}  // namespace promptcache::cli
