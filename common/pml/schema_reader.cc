#include <algorithm>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/names.h"
#include "common/pml/schema_tree.h"
#include "common/pml/white_space.h"
#include "common/pml/xml.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

// Where an element's content stands.
struct Scope {
  int32_t module = -1;   // -1: the root
  int32_t message = -1;  // of the root
  bool in_role = false;
  bool preserve = false;
  bool cached = true;
  std::optional<int32_t> union_id;  // inside a union: its id
  MessageBefore before_union;
};

bool IsParam(std::string_view name) {
  return name == "param" || name == "parameter";
}

// Whether a role element stands in `element`, where one may stand.
bool HoldsRoles(const XmlElement& element) {
  for (const XmlNode& node : element.children) {
    if (node.element == nullptr) continue;
    const std::string& name = node.element->name;
    if (element.name != "union" && RoleOf(name).has_value()) return true;
    if ((name == "module" || name == "union") && HoldsRoles(*node.element)) {
      return true;
    }
  }
  return false;
}

int64_t CountModules(const XmlElement& element) {
  int64_t count = 0;
  for (const XmlNode& node : element.children) {
    if (node.element == nullptr) continue;
    count += (node.element->name == "module") + CountModules(*node.element);
  }
  return count;
}

// Walks the document once, in its order, so that the first fault met is the
// first in the document; fills the tree as it goes.
class Reader {
 public:
  explicit Reader(const SchemaSource& source) : source_(source) {}

  absl::StatusOr<SchemaTree> Read(const XmlElement& root);

 private:
  static absl::Status Fault(const XmlElement& at, std::string reason,
                            std::string detail) {
    return PmlError{.reason = std::move(reason),
                    .source = Source::kSchema,
                    .place = at.place,
                    .detail = std::move(detail)}
        .ToStatus();
  }
  static absl::Status Misplaced(const XmlElement& at, const XmlElement& in) {
    return Fault(
        at, "PML_UNKNOWN_ELEMENT",
        absl::StrCat("<", at.name, "> may not stand in <", in.name, ">"));
  }
  static absl::Status TemplateFault(const XmlElement& at,
                                    const absl::Status& why) {
    return Fault(at, "PML_CHAT_TEMPLATE", std::string(why.message()));
  }
  static absl::Status OutsideRole(const XmlElement& at) {
    return Fault(at, "PML_TEXT_OUTSIDE_ROLE",
                 absl::StrCat("text of <", at.name,
                              "> stands outside the messages beside it: where "
                              "there are role elements, all text is in them"));
  }

  absl::Status CheckAttributes(const XmlElement& e,
                               std::initializer_list<std::string_view> known);
  absl::Status CheckName(const XmlElement& e);
  absl::Status ReadSpace(const XmlElement& e, Scope* scope);

  absl::Status ReadChildren(const XmlElement& e, const Scope& scope);
  absl::Status ReadText(const XmlElement& e, const std::string& raw, bool last,
                        const Scope& scope);
  absl::Status ReadElement(const XmlElement& e, const XmlElement& in,
                           const Scope& scope);
  absl::Status ReadModule(const XmlElement& e, const Scope& scope);
  absl::Status ReadUnion(const XmlElement& e, const Scope& scope);
  absl::Status ReadParam(const XmlElement& e, const Scope& scope);
  absl::Status ReadRole(const XmlElement& e, Role role, const Scope& scope);
  absl::Status BeginMessage(const XmlElement& e, Role role);
  absl::Status ReadScaffold(const XmlElement& e, const Scope& scope);
  absl::Status ExpectNoContent(const XmlElement& e);

  // Ends the text before a module or param, or where the message changes.
  void EndText(const Scope& scope);
  int32_t AddModule(SchemaModule module);

  SchemaModule& module(int32_t index) {
    return tree_.modules[static_cast<size_t>(index)];
  }

  const SchemaSource source_;
  SchemaTree tree_;
  MarkedText text_;  // not ended yet
  std::optional<TextMessages> text_messages_;
  MessageBefore before_ = {.known = true};
  bool in_preamble_ = true;
  int32_t num_anonymous_ = 0;
};

absl::StatusOr<SchemaTree> Reader::Read(const XmlElement& root) {
  if (root.name != "schema") {
    return Fault(
        root, "PML_UNKNOWN_ELEMENT",
        absl::StrCat("a schema document is a <schema>, not <", root.name, ">"));
  }
  PC_RETURN_IF_ERROR(CheckLimit(Source::kSchema, "modules", CountModules(root),
                                source_.limits->modules));
  tree_.has_roles = HoldsRoles(root);
  tree_.modules.emplace_back();
  Scope scope;
  PC_RETURN_IF_ERROR(CheckAttributes(root, {"name"}));
  PC_RETURN_IF_ERROR(CheckName(root));
  PC_RETURN_IF_ERROR(ReadSpace(root, &scope));
  tree_.name = *root.Attribute("name");
  PC_RETURN_IF_ERROR(ReadChildren(root, scope));
  EndText(scope);
  PC_RETURN_IF_ERROR(JudgeScaffolds(&tree_));
  return std::move(tree_);
}

absl::Status Reader::CheckAttributes(
    const XmlElement& e, std::initializer_list<std::string_view> known) {
  for (const auto& [name, value] : e.attributes) {
    if (name == "xml:space" ||
        std::find(known.begin(), known.end(), name) != known.end()) {
      continue;
    }
    return Fault(e, "PML_UNKNOWN_ATTRIBUTE",
                 absl::StrCat("<", e.name, "> has no attribute ", name));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckName(const XmlElement& e) {
  const std::string* name = e.Attribute("name");
  if (name == nullptr || !IsName(*name)) {
    return Fault(e, "PML_BAD_NAME",
                 name == nullptr
                     ? absl::StrCat("<", e.name, "> needs a name")
                     : absl::StrCat("\"", *name,
                                    "\" is no name: letters, digits, _ . -, "
                                    "a letter or _ first, no element's name"));
  }
  return CheckLimit(Source::kSchema, "name characters",
                    static_cast<int64_t>(name->size()),
                    source_.limits->name_chars);
}

absl::Status Reader::ReadSpace(const XmlElement& e, Scope* scope) {
  if (ReadSpaceAttribute(e, scope->preserve, &scope->preserve)) {
    return absl::OkStatus();
  }
  return Fault(e, "PML_BAD_VALUE", "xml:space is preserve or default");
}

absl::Status Reader::ReadChildren(const XmlElement& e, const Scope& scope) {
  for (const XmlNode& node : e.children) {
    if (node.element != nullptr) {
      PC_RETURN_IF_ERROR(ReadElement(*node.element, e, scope));
    } else {
      const bool last = &node == &e.children.back();
      PC_RETURN_IF_ERROR(ReadText(e, node.text, last, scope));
    }
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadText(const XmlElement& e, const std::string& raw,
                              bool last, const Scope& scope) {
  const bool space = IsAllSpace(raw);
  if (e.name == "union") {
    if (space) return absl::OkStatus();
    return Fault(e, "PML_UNEXPECTED_TEXT", "a union holds modules only");
  }
  const bool at_root = scope.module < 0;
  if (!scope.in_role &&
      (at_root ? tree_.has_roles
               : module(scope.module).kind == ModuleKind::kHoldsMessages)) {
    return space ? absl::OkStatus() : OutsideRole(e);
  }
  const std::string text =
      scope.preserve ? raw
                     : StripLayout(raw, last && RoleOf(e.name).has_value());
  if (at_root && !scope.in_role && !text.empty()) {
    (space ? tree_.has_plain_space : tree_.has_plain_text) = true;
    if (space && source_.drop_root_space) return absl::OkStatus();
  }
  text_.AppendText(text);
  return absl::OkStatus();
}

absl::Status Reader::ReadElement(const XmlElement& e, const XmlElement& in,
                                 const Scope& scope) {
  const bool in_union = scope.union_id.has_value();
  if (e.name == "module") return ReadModule(e, scope);
  if (in_union) return Misplaced(e, in);
  if (e.name == "union") return ReadUnion(e, scope);
  if (IsParam(e.name)) return ReadParam(e, scope);
  if (const std::optional<Role> role = RoleOf(e.name); role.has_value()) {
    return ReadRole(e, *role, scope);
  }
  if (e.name == "scaffold" && scope.module < 0 && !scope.in_role) {
    return ReadScaffold(e, scope);
  }
  return Misplaced(e, in);
}

absl::Status Reader::ReadModule(const XmlElement& e, const Scope& scope) {
  Scope inner = scope;
  inner.union_id.reset();
  PC_RETURN_IF_ERROR(CheckAttributes(e, {"name", "cache"}));
  PC_RETURN_IF_ERROR(CheckName(e));
  if (const std::string* cache = e.Attribute("cache"); cache != nullptr) {
    if (*cache != "true" && *cache != "false") {
      return Fault(
          e, "PML_BAD_VALUE",
          absl::StrCat("cache is true or false, not \"", *cache, "\""));
    }
    inner.cached = scope.cached && *cache == "true";
  }
  PC_RETURN_IF_ERROR(ReadSpace(e, &inner));
  const std::string& name = *e.Attribute("name");
  SchemaModule added;
  added.name = name;
  added.path = scope.module < 0
                   ? name
                   : absl::StrCat(module(scope.module).path, "/", name);
  if (tree_.by_path.contains(added.path)) {
    return Fault(e, "PML_DUPLICATE_NAME",
                 absl::StrCat("two modules \"", added.path, "\""));
  }
  added.parent = scope.module;
  added.union_id = scope.union_id.value_or(-1);
  added.message = scope.message;
  added.cached = inner.cached;
  added.named = true;
  added.kind = scope.in_role   ? ModuleKind::kInMessage
               : HoldsRoles(e) ? ModuleKind::kHoldsMessages
                               : ModuleKind::kFree;
  if (scope.module >= 0 && !scope.in_role && added.kind == ModuleKind::kFree &&
      module(scope.module).kind == ModuleKind::kHoldsMessages) {
    return OutsideRole(e);
  }
  // A union has ended the text before it, and holds its members' part.
  if (!scope.union_id.has_value()) EndText(scope);
  const MessageBefore without = before_;
  if (scope.module < 0) {
    before_ = {};
  } else if (scope.union_id.has_value()) {
    before_ = scope.before_union;
  }
  inner.module = AddModule(std::move(added));
  if (!scope.union_id.has_value()) {
    if (scope.module < 0) {
      tree_.root.push_back({.modules = {inner.module}});
    } else {
      module(scope.module)
          .parts.push_back(
              {.kind = SchemaPart::Kind::kModules, .modules = {inner.module}});
    }
  }
  PC_RETURN_IF_ERROR(ReadChildren(e, inner));
  EndText(inner);
  if (before_ != without) before_ = {};
  return absl::OkStatus();
}

absl::Status Reader::ReadUnion(const XmlElement& e, const Scope& scope) {
  Scope inner = scope;
  PC_RETURN_IF_ERROR(CheckAttributes(e, {"name"}));
  if (e.Attribute("name") != nullptr) PC_RETURN_IF_ERROR(CheckName(e));
  PC_RETURN_IF_ERROR(ReadSpace(e, &inner));
  inner.union_id = tree_.num_unions++;
  inner.before_union = before_;
  EndText(scope);
  PC_RETURN_IF_ERROR(ReadChildren(e, inner));
  std::vector<int32_t> members;
  for (size_t i = 0; i < tree_.modules.size(); ++i) {
    if (tree_.modules[i].union_id == *inner.union_id) {
      members.push_back(static_cast<int32_t>(i));
    }
  }
  if (members.empty()) {
    return Fault(e, "PML_EMPTY_UNION", "a union needs a module");
  }
  if (scope.module < 0) {
    tree_.root.push_back({.modules = std::move(members)});
  } else {
    module(scope.module)
        .parts.push_back({.kind = SchemaPart::Kind::kModules,
                          .modules = std::move(members)});
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadParam(const XmlElement& e, const Scope& scope) {
  if (scope.module < 0) {
    return Fault(e, "PML_PARAM_OUTSIDE_MODULE",
                 absl::StrCat("<", e.name, "> stands in a module only"));
  }
  Scope inner = scope;
  PC_RETURN_IF_ERROR(CheckAttributes(e, {"name", "length", "len", "scaffold"}));
  PC_RETURN_IF_ERROR(CheckName(e));
  PC_RETURN_IF_ERROR(ReadSpace(e, &inner));
  const std::string* length = e.Attribute("length");
  const std::string* len = e.Attribute("len");
  if (length != nullptr && len != nullptr) {
    return Fault(e, "PML_BAD_LENGTH", "length and len are one attribute");
  }
  if (length == nullptr) length = len;
  const int32_t tokens = length == nullptr ? 0 : ParseLength(*length);
  if (tokens == 0) {
    return Fault(e, "PML_BAD_LENGTH",
                 absl::StrCat("a param's length is its room in tokens, from 1",
                              length == nullptr ? "" : ", not ",
                              length == nullptr ? "" : *length));
  }
  const std::string& name = *e.Attribute("name");
  if (tree_.FindParam(scope.module, name) >= 0) {
    return Fault(e, "PML_DUPLICATE_NAME",
                 absl::StrCat("two params \"", name, "\" in module \"",
                              module(scope.module).path, "\""));
  }
  if (!scope.in_role &&
      module(scope.module).kind == ModuleKind::kHoldsMessages) {
    return OutsideRole(e);
  }
  EndText(scope);
  SchemaModule& owner = module(scope.module);
  SchemaParam param{.name = name, .length = tokens, .place = e.place};
  if (const std::string* text = e.Attribute("scaffold"); text != nullptr) {
    param.has_scaffold = true;
    param.scaffold = *text;
  }
  owner.parts.push_back({.kind = SchemaPart::Kind::kParam,
                         .index = static_cast<int32_t>(owner.params.size())});
  tree_.params.emplace(absl::StrCat(owner.path, "?", name),
                       static_cast<int32_t>(owner.params.size()));
  owner.params.push_back(std::move(param));
  return ExpectNoContent(e);
}

absl::Status Reader::ReadRole(const XmlElement& e, Role role,
                              const Scope& scope) {
  if (scope.in_role) {
    return Fault(e, "PML_NESTED_ROLE",
                 absl::StrCat("<", e.name, "> stands inside a message"));
  }
  Scope inner = scope;
  inner.in_role = true;
  PC_RETURN_IF_ERROR(CheckAttributes(e, {}));
  PC_RETURN_IF_ERROR(ReadSpace(e, &inner));
  const Marker& end = source_.chat_template->End(role);
  if (scope.module >= 0) {
    module(scope.module).has_message = true;
    PC_RETURN_IF_ERROR(BeginMessage(e, role));
    PC_RETURN_IF_ERROR(ReadChildren(e, inner));
    text_.AppendMarkers(end);
    return absl::OkStatus();
  }
  inner.message = static_cast<int32_t>(tree_.messages.size());
  tree_.messages.push_back(role);
  if (in_preamble_) {
    tree_.preamble_has_message = true;
    tree_.preamble_message = inner.message;
    tree_.preamble_last = role;
    PC_RETURN_IF_ERROR(BeginMessage(e, role));
  } else if (const auto alone = source_.chat_template->Start({}, role);
             !alone.ok()) {
    return TemplateFault(e, alone.status());
  }
  PC_RETURN_IF_ERROR(ReadChildren(e, inner));
  if (in_preamble_) {
    text_.AppendMarkers(end);
    tree_.preamble_message = -1;
  } else {
    EndText(inner);
  }
  return absl::OkStatus();
}

absl::Status Reader::BeginMessage(const XmlElement& e, Role role) {
  const ChatTemplate& chat = *source_.chat_template;
  const absl::StatusOr<Marker> start =
      before_.known ? chat.Start(before_.role, role) : chat.UsualStart(role);
  if (!start.ok()) {
    return TemplateFault(e, start.status());
  }
  text_.AppendMarkers(*start);
  if (!text_messages_.has_value()) {
    text_messages_ = {.before = before_, .first = role};
  }
  text_messages_->last = role;
  before_ = {.known = true, .role = role};
  return absl::OkStatus();
}

absl::Status Reader::ReadScaffold(const XmlElement& e, const Scope& scope) {
  Scope inner = scope;
  PC_RETURN_IF_ERROR(CheckAttributes(e, {"modules"}));
  PC_RETURN_IF_ERROR(ReadSpace(e, &inner));
  const std::string* list = e.Attribute("modules");
  tree_.scaffolds.push_back(
      {.list = list == nullptr ? "" : *list, .place = e.place});
  return ExpectNoContent(e);
}

absl::Status Reader::ExpectNoContent(const XmlElement& e) {
  for (const XmlNode& node : e.children) {
    if (node.element != nullptr) return Misplaced(*node.element, e);
    if (!IsAllSpace(node.text)) {
      return Fault(e, "PML_UNEXPECTED_TEXT",
                   absl::StrCat("<", e.name, "> holds no text"));
    }
  }
  return absl::OkStatus();
}

void Reader::EndText(const Scope& scope) {
  MarkedText text = std::exchange(text_, MarkedText());
  const auto messages = std::exchange(text_messages_, std::nullopt);
  int32_t owner = scope.module;
  if (owner < 0 && in_preamble_) {
    in_preamble_ = false;
    owner = 0;
  }
  if (text.empty() && !messages.has_value()) return;
  if (owner < 0) {
    SchemaModule anonymous;
    anonymous.path = absl::StrCat("#", ++num_anonymous_);
    anonymous.message = scope.message;
    owner = AddModule(std::move(anonymous));
    tree_.root.push_back({.modules = {owner}});
  }
  SchemaModule& m = module(owner);
  m.parts.push_back(
      {.index = static_cast<int32_t>(m.texts.size()), .messages = messages});
  m.texts.push_back(std::move(text));
}

int32_t Reader::AddModule(SchemaModule added) {
  const int32_t index = static_cast<int32_t>(tree_.modules.size());
  if (added.named) tree_.by_path.emplace(added.path, index);
  tree_.modules.push_back(std::move(added));
  return index;
}

}  // namespace

int32_t SchemaTree::Find(std::string_view path) const {
  const auto it = by_path.find(ToAbsl(path));
  return it == by_path.end() ? -1 : it->second;
}

int32_t SchemaTree::FindParam(int32_t module, std::string_view param) const {
  const std::string& path = modules[static_cast<size_t>(module)].path;
  const auto it = params.find(absl::StrCat(path, "?", ToAbsl(param)));
  return it == params.end() ? -1 : it->second;
}

absl::StatusOr<SchemaTree> ReadSchema(const SchemaSource& source) {
  PC_RETURN_IF_ERROR(CheckLimit(Source::kSchema, "document bytes",
                                static_cast<int64_t>(source.text.size()),
                                source.limits->schema_bytes));
  PC_ASSIGN_OR_RETURN(
      const std::unique_ptr<XmlElement> root,
      ParseXml(source.text, Source::kSchema, source.limits->depth));
  return Reader(source).Read(*root);
}

}  // namespace promptcache::pml
