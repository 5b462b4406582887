#include "common/pml/conversation_check.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/chat_template.h"
#include "common/pml/conversation.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

using nlohmann::json;

// By its name and from its source, where the file has them.
absl::StatusOr<std::vector<ChatTemplate>> TemplatesOf(const json& family) {
  std::vector<ChatTemplate> templates;
  if (family.contains("name")) {
    PC_ASSIGN_OR_RETURN(
        ChatTemplate named,
        ChatTemplate::FromName(family["name"].get<std::string>()));
    templates.push_back(std::move(named));
  }
  if (family.contains("jinja")) {
    PC_ASSIGN_OR_RETURN(
        ChatTemplate recognised,
        ChatTemplate::FromJinja(family["jinja"].get<std::string>()));
    templates.push_back(std::move(recognised));
  }
  if (templates.empty()) {
    return absl::InvalidArgumentError("neither a name nor a source");
  }
  return templates;
}

std::vector<ChatMessage> MessagesOf(const json& conversation) {
  std::vector<ChatMessage> messages;
  for (const json& message : conversation) {
    messages.push_back({.role = message.at("role").get<std::string>(),
                        .content = message.at("content").get<std::string>()});
  }
  return messages;
}

// [["c", "<|im_start|>"], ["t", "user\n"]]
json PartsOf(const MarkedText& text) {
  json parts = json::array();
  for (const MarkerPart& part : text.parts()) {
    parts.push_back({part.control ? "c" : "t", part.text});
  }
  return parts;
}

std::string Difference(const json& expected, const json& actual) {
  if (expected == actual) return "";
  const auto shown = [](const json& j) {
    return j.dump(-1, ' ', /*ensure_ascii=*/true,
                  json::error_handler_t::replace);
  };
  return absl::StrCat("expected ", shown(expected), ", is ", shown(actual));
}

std::string CheckCase(const json& c, const std::vector<ChatMessage>& messages,
                      const ChatTemplate& chat_template,
                      const Tokenizer* tokenizer) {
  const absl::StatusOr<MarkedText> marked = MarkConversation(
      messages, chat_template, {.asks_for_answer = c.at("asks").get<bool>()});
  if (c.value("refused", false)) {
    return marked.ok() ? "expected to be refused" : "";
  }
  if (!marked.ok()) return std::string(marked.status().message());
  if (c.contains("parts")) {
    const std::string parts = Difference(c["parts"], PartsOf(*marked));
    if (!parts.empty()) return parts;
  }
  if (!c.contains("ids")) return "";
  if (tokenizer == nullptr) return "it has ids: name a vocabulary";
  const absl::StatusOr<std::vector<int32_t>> ids = marked->Tokens(*tokenizer);
  if (!ids.ok()) return std::string(ids.status().message());
  return Difference(c["ids"], json(*ids));
}

}  // namespace

absl::StatusOr<std::vector<CaseResult>> CheckConversations(
    std::string_view json_text, const Tokenizer* tokenizer) {
  // The only exceptions here are nlohmann-json's, of a file in another form.
  try {
    const json file = json::parse(json_text);
    std::vector<CaseResult> results;
    for (const json& family : file.at("chat_templates")) {
      const std::string name = family.at("family").get<std::string>();
      const absl::StatusOr<std::vector<ChatTemplate>> templates =
          TemplatesOf(family);
      if (!templates.ok()) {
        results.push_back({name, std::string(templates.status().message())});
        continue;
      }
      for (const json& c : family.at("cases")) {
        const std::string conversation =
            c.at("conversation").get<std::string>();
        const std::vector<ChatMessage> messages =
            MessagesOf(file.at("conversations").at(conversation));
        for (const ChatTemplate& chat_template : *templates) {
          results.push_back(
              {absl::StrCat(name, " (", chat_template.name(), ") ",
                            conversation,
                            c.at("asks").get<bool>() ? ", asks" : ""),
               CheckCase(c, messages, chat_template, tokenizer)});
        }
      }
    }
    return results;
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(
        absl::StrCat("not a file of conversations: ", e.what()));
  }
}

}  // namespace promptcache::pml
