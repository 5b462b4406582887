#include "common/pml/prompt_judge.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/pml/names.h"
#include "common/pml/white_space.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

// The role element that an item stands in.
struct RoleScope {
  Role role;
  size_t step;  // its kRoleBegin
};

class Judge {
 public:
  Judge(const Schema& schema, const Prompt& prompt)
      : schema_(schema), prompt_(prompt) {
    has_roles_ = std::any_of(prompt.items.begin(), prompt.items.end(),
                             [](const PromptItem& item) {
                               return item.kind == PromptItem::Kind::kRole;
                             });
    tree_ = &schema.tree(has_roles_);
    out_.tree = tree_;
    out_.imported.resize(tree_->modules.size());
    union_member_.resize(static_cast<size_t>(tree_->num_unions), -1);
  }

  absl::StatusOr<JudgedPrompt> Run();

 private:
  static absl::Status Fault(Place place, std::string reason,
                            std::string detail) {
    return PmlError{.reason = std::move(reason),
                    .source = Source::kPrompt,
                    .place = place,
                    .detail = std::move(detail)}
        .ToStatus();
  }
  static absl::Status Fault(const PromptItem& at, std::string reason,
                            std::string detail) {
    return Fault(at.place, std::move(reason), std::move(detail));
  }

  absl::Status JudgeRoot();
  absl::Status JudgeRole(const PromptItem& item);
  absl::Status JudgeImport(const PromptItem& item, int32_t parent,
                           const RoleScope* role);
  absl::StatusOr<std::vector<int32_t>> Resolve(const PromptItem& item,
                                               int32_t parent) const;
  absl::Status TakeArguments(const PromptItem& item, int32_t module);
  absl::Status MarkImported(const PromptItem& item, int32_t module);
  absl::Status JudgeMessage(const PromptItem& item, int32_t block,
                            const RoleScope* role);
  absl::Status CheckArguments(const PromptItem& item,
                              const std::vector<int32_t>& path) const;
  absl::Status JudgeLengths();

  bool roles() const { return has_roles_ || tree_->has_roles; }
  const SchemaModule& module(int32_t index) const {
    return tree_->modules[static_cast<size_t>(index)];
  }

  const Schema& schema_;
  const Prompt& prompt_;
  const SchemaTree* tree_;
  bool has_roles_ = false;
  JudgedPrompt out_;
  std::vector<int32_t> union_member_;  // by union: the one imported, or -1
  std::vector<Place> argument_places_;
};

absl::StatusOr<JudgedPrompt> Judge::Run() {
  PC_RETURN_IF_ERROR(JudgeRoot());
  for (const PromptItem& item : prompt_.items) {
    switch (item.kind) {
      case PromptItem::Kind::kText:
        if (!roles()) {
          out_.steps.push_back({.text = item.text});
        } else if (!IsAllSpace(item.text)) {
          return Fault(prompt_.place, "PML_TEXT_OUTSIDE_ROLE",
                       "text stands outside role elements: where there are "
                       "messages, all text is in them");
        }
        break;
      case PromptItem::Kind::kImport:
        PC_RETURN_IF_ERROR(JudgeImport(item, /*parent=*/-1, nullptr));
        break;
      case PromptItem::Kind::kRole:
        PC_RETURN_IF_ERROR(JudgeRole(item));
        break;
    }
  }
  if (has_roles_ && tree_->has_plain_text) {
    return Fault(prompt_.place, "PML_TEXT_OUTSIDE_ROLE",
                 absl::StrCat("the prompt has role elements, but schema \"",
                              tree_->name, "\" has text outside messages"));
  }
  PC_RETURN_IF_ERROR(JudgeLengths());
  return std::move(out_);
}

absl::Status Judge::JudgeRoot() {
  if (prompt_.schema != tree_->name) {
    return Fault(prompt_.place, "PML_UNKNOWN_SCHEMA",
                 absl::StrCat("the prompt is of schema \"", prompt_.schema,
                              "\", not of \"", tree_->name, "\""));
  }
  if (prompt_.bad_space_value) {
    return Fault(prompt_.place, "PML_BAD_VALUE",
                 "xml:space is preserve or default");
  }
  return absl::OkStatus();
}

absl::Status Judge::JudgeRole(const PromptItem& item) {
  if (!item.unknown_attribute.empty()) {
    return Fault(item, "PML_UNKNOWN_ATTRIBUTE",
                 absl::StrCat("<", item.text, "> has no attribute ",
                              item.unknown_attribute));
  }
  if (item.bad_space_value) {
    return Fault(item, "PML_BAD_VALUE", "xml:space is preserve or default");
  }
  const std::optional<Role> role = RoleOf(item.text);
  const RoleScope scope{.role = role.value_or(Role::kUser),
                        .step = out_.steps.size()};
  out_.steps.push_back(
      {.kind = JudgedStep::Kind::kRoleBegin, .role = scope.role});
  for (const PromptItem& inner : item.items) {
    switch (inner.kind) {
      case PromptItem::Kind::kText:
        out_.steps.push_back({.text = inner.text});
        break;
      case PromptItem::Kind::kImport:
        PC_RETURN_IF_ERROR(JudgeImport(inner, /*parent=*/-1, &scope));
        break;
      case PromptItem::Kind::kRole:
        return Fault(
            inner, "PML_NESTED_ROLE",
            absl::StrCat("<", inner.text, "> stands inside <", item.text, ">"));
    }
  }
  out_.steps.push_back({.kind = JudgedStep::Kind::kRoleEnd});
  return absl::OkStatus();
}

absl::Status Judge::JudgeImport(const PromptItem& item, int32_t parent,
                                const RoleScope* role) {
  PC_ASSIGN_OR_RETURN(const std::vector<int32_t> path, Resolve(item, parent));
  PC_RETURN_IF_ERROR(TakeArguments(item, path.back()));
  if (item.bad_space_value) {
    return Fault(item, "PML_BAD_VALUE", "xml:space is preserve or default");
  }
  for (const int32_t index : path) {
    PC_RETURN_IF_ERROR(MarkImported(item, index));
  }
  if (parent < 0) {
    PC_RETURN_IF_ERROR(JudgeMessage(item, path.front(), role));
    out_.steps.push_back(
        {.kind = JudgedStep::Kind::kBlock, .module = path.front()});
  }
  PC_RETURN_IF_ERROR(CheckArguments(item, path));
  for (const PromptItem& inner : item.items) {
    switch (inner.kind) {
      case PromptItem::Kind::kText:
        if (IsAllSpace(inner.text)) break;
        return Fault(item, "PML_UNEXPECTED_TEXT",
                     absl::StrCat("text inside the import of \"",
                                  module(path.back()).path, "\""));
      case PromptItem::Kind::kImport:
        PC_RETURN_IF_ERROR(JudgeImport(inner, path.back(), role));
        break;
      case PromptItem::Kind::kRole:
        return Fault(
            inner, "PML_UNKNOWN_ELEMENT",
            absl::StrCat("<", inner.text, "> may not stand in an import"));
    }
  }
  return absl::OkStatus();
}

// The modules along the import's path, outermost first; never empty.
absl::StatusOr<std::vector<int32_t>> Judge::Resolve(const PromptItem& item,
                                                    int32_t parent) const {
  std::vector<int32_t> path;
  std::string name = parent < 0 ? "" : module(parent).path;
  const std::vector<std::string> steps = absl::StrSplit(item.text, '/');
  for (const std::string& step : steps) {
    if (!name.empty()) name += '/';
    name += step;
    const int32_t index = step.empty() ? -1 : tree_->Find(name);
    if (index < 0) {
      return Fault(item, "PML_UNKNOWN_MODULE",
                   item.text.empty()
                       ? std::string("the import names no module")
                       : absl::StrCat("schema \"", tree_->name,
                                      "\" has no module \"", name, "\""));
    }
    path.push_back(index);
  }
  return path;
}

absl::Status Judge::TakeArguments(const PromptItem& item, int32_t index) {
  for (const auto& [name, text] : item.arguments) {
    const int32_t param = tree_->FindParam(index, name);
    if (param < 0) {
      return Fault(item, "PML_UNKNOWN_PARAM",
                   absl::StrCat("module \"", module(index).path,
                                "\" has no param \"", name, "\""));
    }
    out_.argument_index.emplace(std::make_pair(index, param),
                                out_.arguments.size());
    out_.arguments.push_back({.module = index, .param = param, .text = text});
    argument_places_.push_back(item.place);
  }
  return absl::OkStatus();
}

absl::Status Judge::MarkImported(const PromptItem& item, int32_t index) {
  const SchemaModule& m = module(index);
  if (out_.imported[static_cast<size_t>(index)]) {
    return Fault(item, "PML_DUPLICATE_IMPORT",
                 absl::StrCat("module \"", m.path, "\" is imported already"));
  }
  out_.imported[static_cast<size_t>(index)] = true;
  if (m.union_id < 0) return absl::OkStatus();
  int32_t& member = union_member_[static_cast<size_t>(m.union_id)];
  if (member >= 0) {
    return Fault(
        item, "PML_UNION_CONFLICT",
        absl::StrCat("modules \"", m.path, "\" and \"", module(member).path,
                     "\" are of one union: import one of them"));
  }
  member = index;
  return absl::OkStatus();
}

// Where a block may be imported, and which message a role element continues.
absl::Status Judge::JudgeMessage(const PromptItem& item, int32_t block,
                                 const RoleScope* role) {
  const SchemaModule& m = module(block);
  if (role == nullptr) {
    if (!roles() || m.kind != ModuleKind::kFree) return absl::OkStatus();
    return Fault(item, "PML_TEXT_OUTSIDE_ROLE",
                 absl::StrCat("module \"", m.path,
                              "\" stands in no message: import it in a role "
                              "element"));
  }
  if (m.kind == ModuleKind::kFree) return absl::OkStatus();
  if (m.kind == ModuleKind::kHoldsMessages) {
    return Fault(item, "PML_NESTED_ROLE",
                 absl::StrCat("module \"", m.path,
                              "\" holds whole messages: import it outside "
                              "role elements"));
  }
  const Role its_role = tree_->messages[static_cast<size_t>(m.message)];
  int32_t& message = out_.steps[role->step].message;
  if (its_role != role->role) {
    return Fault(item, "PML_ROLE_MISMATCH",
                 absl::StrCat("module \"", m.path, "\" stands in a ",
                              ToAbsl(RoleName(its_role)), " message, not in a ",
                              ToAbsl(RoleName(role->role)), " message"));
  }
  if (message >= 0 && message != m.message) {
    return Fault(item, "PML_ROLE_MISMATCH",
                 absl::StrCat("module \"", m.path,
                              "\" stands in another message than the imports "
                              "before it in this role element"));
  }
  message = m.message;
  return absl::OkStatus();
}

absl::Status Judge::CheckArguments(const PromptItem& item,
                                   const std::vector<int32_t>& path) const {
  for (const int32_t index : path) {
    const SchemaModule& m = module(index);
    for (size_t i = 0; i < m.params.size(); ++i) {
      if (m.params[i].has_scaffold ||
          out_.Argument(index, static_cast<int32_t>(i)) != nullptr) {
        continue;
      }
      return Fault(item, "PML_MISSING_ARGUMENT",
                   absl::StrCat("param \"", m.params[i].name, "\" of module \"",
                                m.path, "\" needs an argument"));
    }
  }
  return absl::OkStatus();
}

absl::Status Judge::JudgeLengths() {
  for (size_t i = 0; i < out_.arguments.size(); ++i) {
    JudgedArgument& argument = out_.arguments[i];
    const SchemaModule& m = module(argument.module);
    const SchemaParam& param = m.params[static_cast<size_t>(argument.param)];
    argument.tokens = schema_.tokenizer().Encode(argument.text);
    const int64_t tokens = static_cast<int64_t>(argument.tokens.size());
    if (tokens <= param.length) continue;
    return PmlError{
        .reason = "PML_ARGUMENT_TOO_LONG",
        .source = Source::kPrompt,
        .place = argument_places_[i],
        .detail = absl::StrCat("the argument of param \"", param.name,
                               "\" of module \"", m.path, "\" has ", tokens,
                               " tokens, its slot ", param.length),
        .numbers = {{"tokens", tokens}, {"length", param.length}}}
        .ToStatus();
  }
  return absl::OkStatus();
}

}  // namespace

const JudgedArgument* JudgedPrompt::Argument(int32_t module,
                                             int32_t param) const {
  const auto it = argument_index.find(std::make_pair(module, param));
  return it == argument_index.end() ? nullptr : &arguments[it->second];
}

absl::StatusOr<JudgedPrompt> JudgePrompt(const Schema& schema,
                                         const Prompt& prompt) {
  return Judge(schema, prompt).Run();
}

}  // namespace promptcache::pml
