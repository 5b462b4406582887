#include "common/pml/prompt.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/names.h"
#include "common/pml/white_space.h"
#include "common/pml/xml.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

constexpr char kSpaceAttribute[] = "xml:space";

std::vector<PromptItem> ReadItems(const XmlElement& e, bool preserve);

PromptItem ReadRole(const XmlElement& e, bool preserve) {
  PromptItem role{
      .kind = PromptItem::Kind::kRole, .place = e.place, .text = e.name};
  for (const auto& [name, value] : e.attributes) {
    if (name != kSpaceAttribute) {
      role.unknown_attribute = name;
      break;
    }
  }
  role.bad_space_value = !ReadSpaceAttribute(e, preserve, &preserve);
  role.items = ReadItems(e, preserve);
  return role;
}

PromptItem ReadImport(const XmlElement& e, bool preserve) {
  PromptItem import{.kind = PromptItem::Kind::kImport, .place = e.place};
  const bool by_path = e.name == "import";
  if (!by_path) import.text = e.name;
  for (const auto& [name, value] : e.attributes) {
    if (name == kSpaceAttribute) continue;
    if (by_path && name == "module") {
      import.text = value;
    } else {
      import.arguments.emplace_back(name, value);
    }
  }
  import.bad_space_value = !ReadSpaceAttribute(e, preserve, &preserve);
  import.items = ReadItems(e, preserve);
  return import;
}

std::vector<PromptItem> ReadItems(const XmlElement& e, bool preserve) {
  const bool strips_last = e.name == "prompt" || RoleOf(e.name).has_value();
  std::vector<PromptItem> items;
  for (const XmlNode& node : e.children) {
    if (node.element == nullptr) {
      const bool last = strips_last && &node == &e.children.back();
      PromptItem text{.text =
                          preserve ? node.text : StripLayout(node.text, last)};
      if (!text.text.empty()) items.push_back(std::move(text));
    } else if (RoleOf(node.element->name).has_value()) {
      items.push_back(ReadRole(*node.element, preserve));
    } else {
      items.push_back(ReadImport(*node.element, preserve));
    }
  }
  return items;
}

// Turns the structured form into items, within the limits.
class Converter {
 public:
  explicit Converter(const Limits& limits) : limits_(limits) {}

  absl::StatusOr<std::vector<PromptItem>> Convert(
      const std::vector<StructuredItem>& items, int64_t depth) {
    std::vector<PromptItem> out;
    for (const StructuredItem& item : items) {
      PC_ASSIGN_OR_RETURN(PromptItem converted, Convert(item, depth));
      const bool nothing =
          converted.kind == PromptItem::Kind::kText && converted.text.empty();
      if (!nothing) out.push_back(std::move(converted));
    }
    return out;
  }

 private:
  absl::StatusOr<PromptItem> Convert(const StructuredItem& item,
                                     int64_t depth) {
    if (const auto* text = std::get_if<std::string>(&item.item)) {
      PC_RETURN_IF_ERROR(Count(*text));
      return PromptItem{.text = *text};
    }
    if (const auto* import = std::get_if<StructuredImport>(&item.item)) {
      return Convert(*import, depth);
    }
    const auto& message = std::get<StructuredMessage>(item.item);
    PC_RETURN_IF_ERROR(
        CheckLimit(Source::kPrompt, "depth", depth, limits_.depth));
    PC_RETURN_IF_ERROR(Count(message.role));
    if (!RoleOf(message.role).has_value()) {
      return PmlError{.reason = "PML_UNKNOWN_ELEMENT",
                      .source = Source::kPrompt,
                      .detail = absl::StrCat("\"", message.role,
                                             "\" is no role: use system, user "
                                             "or assistant")}
          .ToStatus();
    }
    PromptItem role{.kind = PromptItem::Kind::kRole, .text = message.role};
    PC_ASSIGN_OR_RETURN(role.items, Convert(message.items, depth + 1));
    return role;
  }

  absl::StatusOr<PromptItem> Convert(const StructuredImport& import,
                                     int64_t depth) {
    PC_RETURN_IF_ERROR(
        CheckLimit(Source::kPrompt, "depth", depth, limits_.depth));
    PC_RETURN_IF_ERROR(Count(import.path));
    PromptItem out{.kind = PromptItem::Kind::kImport, .text = import.path};
    for (const auto& [name, value] : import.arguments) {
      PC_RETURN_IF_ERROR(Count(name));
      PC_RETURN_IF_ERROR(Count(value));
      out.arguments.emplace_back(name, value);
    }
    for (const StructuredImport& inner : import.imports) {
      PC_ASSIGN_OR_RETURN(PromptItem item, Convert(inner, depth + 1));
      out.items.push_back(std::move(item));
    }
    return out;
  }

  absl::Status Count(const std::string& text) {
    bytes_ += static_cast<int64_t>(text.size());
    return CheckLimit(Source::kPrompt, "document bytes", bytes_,
                      limits_.prompt_bytes);
  }

  const Limits& limits_;
  int64_t bytes_ = 0;
};

// What the document's own element lacks: its faults come first, and without a
// name no schema can be looked for.
absl::Status CheckNamesSchema(const Prompt& prompt) {
  PmlError error{.source = Source::kPrompt, .place = prompt.place};
  if (!prompt.unknown_attribute.empty()) {
    error.reason = "PML_UNKNOWN_ATTRIBUTE";
    error.detail =
        absl::StrCat("<prompt> has no attribute ", prompt.unknown_attribute);
  } else if (prompt.schema.empty()) {
    error.reason = "PML_UNKNOWN_SCHEMA";
    error.detail = prompt.place.line > 0
                       ? "<prompt> needs a schema: <prompt schema=\"NAME\">"
                       : "the prompt names no schema";
  } else {
    return absl::OkStatus();
  }
  return error.ToStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Prompt>> ParsePrompt(
    std::string_view text, const Limits& limits) {
  PC_RETURN_IF_ERROR(CheckLimit(Source::kPrompt, "document bytes",
                                static_cast<int64_t>(text.size()),
                                limits.prompt_bytes));
  PC_ASSIGN_OR_RETURN(const std::unique_ptr<XmlElement> root,
                      ParseXml(text, Source::kPrompt, limits.depth));
  if (root->name != "prompt") {
    return PmlError{.reason = "PML_UNKNOWN_ELEMENT",
                    .source = Source::kPrompt,
                    .place = root->place,
                    .detail = absl::StrCat("a prompt document is a <prompt>, "
                                           "not <",
                                           root->name, ">")}
        .ToStatus();
  }
  auto prompt = std::make_shared<Prompt>();
  prompt->place = root->place;
  for (const auto& [name, value] : root->attributes) {
    if (name == "schema") {
      prompt->schema = value;
    } else if (name != kSpaceAttribute && prompt->unknown_attribute.empty()) {
      prompt->unknown_attribute = name;
    }
  }
  PC_RETURN_IF_ERROR(CheckNamesSchema(*prompt));
  bool preserve = false;
  prompt->bad_space_value = !ReadSpaceAttribute(*root, false, &preserve);
  prompt->items = ReadItems(*root, preserve);
  return prompt;
}

absl::StatusOr<std::shared_ptr<const Prompt>> MakePrompt(
    const StructuredPrompt& structured, const Limits& limits) {
  auto prompt = std::make_shared<Prompt>();
  prompt->schema = structured.schema;
  PC_ASSIGN_OR_RETURN(prompt->items,
                      Converter(limits).Convert(structured.items, 1));
  PC_RETURN_IF_ERROR(CheckNamesSchema(*prompt));
  return prompt;
}

}  // namespace promptcache::pml
