// How a chat template is recognised from the Jinja source in a model's file.
// Nothing is run: the source is brought to one spelling, and what renders a
// message must be there letter by letter. A template that says it otherwise is
// unknown; better refused than taken for another.

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/chat_template.h"
#include "common/strings.h"

namespace promptcache {
namespace {

using Rules = ChatTemplate::Rules;
using SystemPlace = ChatTemplate::SystemPlace;
using Trim = ChatTemplate::Trim;

char Unescaped(char c) {
  switch (c) {
    case 'n':
      return '\n';
    case 't':
      return '\t';
    case 'r':
      return '\r';
    default:
      return c;
  }
}

// Brings what stands between {{ }} and {% %} to one spelling: no white space,
// strings in single quotes with their escapes resolved, neighbouring strings
// joined. What stands outside is kept, comments go.
class Speller {
 public:
  explicit Speller(std::string_view source) : rest_(source) {}

  std::string Spell() && {
    while (!rest_.empty()) {
      if (Skip("{#")) {
        const size_t end = rest_.find("#}");
        rest_.remove_prefix(end == std::string_view::npos ? rest_.size()
                                                          : end + 2);
      } else if (rest_.starts_with("{{") || rest_.starts_with("{%")) {
        SpellCode();
      } else {
        out_ += Take();
      }
    }
    return absl::StrReplaceAll(out_, {{"['role']", ".role"},
                                      {"['content']", ".content"},
                                      {"{{-", "{{"},
                                      {"-}}", "}}"}});
  }

 private:
  bool Skip(std::string_view prefix) {
    if (!rest_.starts_with(prefix)) return false;
    rest_.remove_prefix(prefix.size());
    return true;
  }
  char Take() {
    const char c = rest_.front();
    rest_.remove_prefix(1);
    return c;
  }

  void SpellCode() {
    out_ += Take();
    out_ += Take();
    while (!rest_.empty()) {
      if (rest_.starts_with("}}") || rest_.starts_with("%}")) {
        out_ += Take();
        out_ += Take();
        return;
      }
      const char c = Take();
      if (c == '\'' || c == '"') {
        SpellString(c);
      } else if (c != ' ' && c != '\n' && c != '\t' && c != '\r') {
        out_ += c;
      }
    }
  }

  void SpellString(char quote) {
    if (out_.ends_with("'+")) {
      out_.resize(out_.size() - 2);
    } else {
      out_ += '\'';
    }
    while (!rest_.empty()) {
      char c = Take();
      if (c == quote) break;
      if (c == '\\' && !rest_.empty()) c = Unescaped(Take());
      out_ += c;
    }
    out_ += '\'';
  }

  std::string_view rest_;
  std::string out_;
};

// A template's source in one spelling.
class Source {
 public:
  explicit Source(std::string_view jinja) : text_(Speller(jinja).Spell()) {}

  bool Has(std::string_view part) const {
    return text_.find(part) != std::string::npos;
  }
  bool HasAny(std::initializer_list<std::string_view> parts) const {
    for (const std::string_view part : parts) {
      if (Has(part)) return true;
    }
    return false;
  }
  // What stands between `begin` and the `end` nearest to it, where that is
  // within one string.
  std::optional<std::string> Between(std::string_view begin,
                                     std::string_view end) const {
    size_t at = text_.find(begin);
    for (; at != std::string::npos; at = text_.find(begin, at + 1)) {
      const size_t from = at + begin.size();
      const size_t to = text_.find(end, from);
      if (to == std::string::npos) break;
      const std::string between = text_.substr(from, to - from);
      if (between.find("'+") == std::string::npos &&
          between.find("}}") == std::string::npos &&
          between.find("%}") == std::string::npos) {
        return between;
      }
    }
    return std::nullopt;
  }

 private:
  const std::string text_;
};

Rules RulesOf(std::string_view name) {
  return ChatTemplate::FromName(name)->rules();
}

void SetTrim(Trim trim, Rules* rules) {
  for (Trim& t : rules->trim) t = trim;
}

std::optional<Rules> AsChatMl(const Source& s) {
  if (!s.HasAny({"'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>",
                 "'<|im_start|>'+message.role+'\n'+content+'<|im_end|>"}) ||
      !s.Has("{{'<|im_start|>assistant\n'}}")) {
    return std::nullopt;
  }
  // Text of its own before the system's.
  if (s.Has("<|im_start|>system\n'}}") &&
      !s.Has("'<|im_start|>system\n'+messages[0].content+'<|im_end|>")) {
    return std::nullopt;
  }
  const auto system = s.Between("<|im_start|>system\n", "<|im_end|>");
  const bool is_qwen = system == RulesOf("qwen").default_system;
  Rules rules = RulesOf(is_qwen ? "qwen" : "chatml");
  if (system.has_value() && !system->empty()) rules.default_system = system;
  return rules;
}

std::optional<Rules> AsLlama2(const Source& s) {
  // Some have a system prompt of their own, which they look for in the text.
  if (!s.Has("<<SYS>>\n") || s.Has("'<<SYS>>'in") ||
      !s.Has("'[INST] '+content.strip()+' [/INST]'") ||
      !s.Has("' '+content.strip()+' '+eos_token")) {
    return std::nullopt;
  }
  Rules rules = RulesOf("llama2");
  if (!s.Has("bos_token+'[INST] '")) rules.again.clear();
  if (s.Has("'<<SYS>>\n'+messages[0].content.strip()")) {
    rules.trim[static_cast<size_t>(Role::kSystem)] = Trim::kBoth;
  }
  return rules;
}

std::optional<Rules> AsLlama3(const Source& s) {
  constexpr std::string_view kStart =
      "'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'+"
      "message.content";
  const bool trims = s.Has(absl::StrCat(ToAbsl(kStart), "|trim+'<|eot_id|>'"));
  if (!trims && !s.Has(absl::StrCat(ToAbsl(kStart), "+'<|eot_id|>'"))) {
    return std::nullopt;
  }
  const auto cutoff = s.Between("Cutting Knowledge Date: ", "\n'");
  if (!cutoff.has_value() &&
      s.Has("<|start_header_id|>system<|end_header_id|>\n\n")) {
    return std::nullopt;  // text of its own before the system's
  }
  Rules rules = RulesOf(cutoff.has_value() ? "llama3.1" : "llama3");
  if (cutoff.has_value()) {
    const auto today = s.Between("date_string='", "'");
    if (!today.has_value() || !s.Has("'Today Date: '+date_string+'\n\n'")) {
      return std::nullopt;
    }
    rules.start[static_cast<size_t>(Role::kSystem)].back().text =
        absl::StrCat("\n\nCutting Knowledge Date: ", *cutoff,
                     "\nToday Date: ", *today, "\n\n");
  }
  if (!trims) SetTrim(Trim::kNothing, &rules);
  return rules;
}

// The assistant's content, and what is done to it.
std::optional<Trim> MistralAnswer(const Source& s, std::string_view lead) {
  for (const std::string_view content :
       {"message.content", "message.content|trim"}) {
    const std::string answer =
        absl::StrCat("{{", ToAbsl(lead), ToAbsl(content), "+eos_token");
    if (s.Has(answer)) {
      return content.ends_with("trim") ? Trim::kBoth : Trim::kNothing;
    }
  }
  return std::nullopt;
}

bool PlaceMistralSystem(const Source& s, Rules* rules) {
  if (rules->system == SystemPlace::kOwnMessage) return true;
  rules->system_before_last_user = s.Has("loop.lastandsystem_messageisdefined");
  if (rules->system_before_last_user ||
      s.Has("loop.firstandsystem_messageisdefined")) {
    rules->system = SystemPlace::kInUserMessage;
    return s.Has("+system_message+'\n\n'+message.content+");
  }
  rules->system = SystemPlace::kNowhere;
  return !s.Has("system_message") &&
         s.Has("raise_exception('Only user and assistant roles are supported");
}

std::optional<Rules> AsMistral(const Source& s) {
  struct Variant {
    const char* name;
    const char* user;
    const char* answer;  // before its content
  };
  constexpr Variant kVariants[] = {
      {"mistral-v7", "'[INST]'+message.content+'[/INST]'", ""},
      {"mistral-v7", "'[INST] '+message.content+'[/INST]'", "' '+"},
      {"mistral-v7", "{{'[INST]'}}", ""},
      {"mistral-v3", "'[INST]'+message.content+'[/INST]'", ""},
      {"mistral-v3", "'[INST] '+message.content+'[/INST]'", "' '+"},
      {"mistral-v1", "'[INST] '+message.content+' [/INST]'", "' '+"},
      {"mistral-v1", "' [INST] '+message.content+' [/INST]'", "' '+"},
      {"mistral-v0", "'[INST] '+message.content+' [/INST]'", ""},
  };
  if (s.Has("<<SYS>>")) return std::nullopt;
  const bool has_own_system =
      s.HasAny({"'[SYSTEM_PROMPT]'+message.content+'[/SYSTEM_PROMPT]'",
                "'[SYSTEM_PROMPT] '+message.content+'[/SYSTEM_PROMPT]'"});
  for (const Variant& variant : kVariants) {
    Rules rules = RulesOf(variant.name);
    const bool own_system = rules.system == SystemPlace::kOwnMessage;
    const std::optional<Trim> trim = MistralAnswer(s, variant.answer);
    if (!s.Has(variant.user) || own_system != has_own_system ||
        !trim.has_value() || !PlaceMistralSystem(s, &rules)) {
      continue;
    }
    rules.trim[static_cast<size_t>(Role::kAssistant)] = *trim;
    return rules;
  }
  return std::nullopt;
}

std::optional<Rules> AsGemma(const Source& s) {
  const bool folds = s.Has("first_user_prefix=messages[0].content+'\n\n'") &&
                     s.Has("'<start_of_turn>'+role+'\n'+(first_user_prefixif");
  const bool refuses = s.Has(
      "'<start_of_turn>'+role+'\n'+message.content|trim+'<end_of_turn>\n'");
  if (!s.Has("<start_of_turn>model\n") || folds == refuses) return std::nullopt;
  Rules rules = RulesOf("gemma");
  if (refuses) rules.system = SystemPlace::kNowhere;
  return rules;
}

std::optional<Rules> AsPhi3(const Source& s) {
  // With the role's name computed, or with a line for each role.
  const bool lines =
      s.HasAny({"'<|user|>\n'+message.content+'<|end|>\n",
                "message.role+'|>\n'+message.content+'<|end|>\n"});
  const bool joined = s.Has("'<|'+message.role+'|>'+message.content+'<|end|>'");
  if (!s.Has("<|assistant|>") || lines == joined) return std::nullopt;
  Rules rules = RulesOf("phi3");
  if (joined) SetTrim(Trim::kNothing, &rules);
  if (!s.HasAny({"<|system|>", "'<|'+message.role"})) {
    rules.system = SystemPlace::kNowhere;
  }
  rules.drops_empty_system = s.Has("'system'andmessage.content");
  return rules;
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::FromJinja(std::string_view source) {
  const Source spelled(source);
  for (const auto as :
       {AsChatMl, AsLlama2, AsLlama3, AsMistral, AsGemma, AsPhi3}) {
    if (std::optional<Rules> rules = as(spelled); rules.has_value()) {
      return ChatTemplate(*std::move(rules));
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the model file's chat template is not one of those known "
                   "here: pass --chat_template=NAME, NAME one of ",
                   KnownNames()));
}

}  // namespace promptcache
