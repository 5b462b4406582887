#include "common/pml/plan_builder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/exactness.h"
#include "common/pml/plan_modules.h"
#include "common/pml/plan_order.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

class Builder {
 public:
  Builder(const Schema& schema, const JudgedPrompt& prompt,
          const CompileOptions& options)
      : schema_(schema),
        prompt_(prompt),
        tree_(*prompt.tree),
        options_(options),
        modules_(tree_, &plan_),
        co_encoded_(tree_.modules.size(), -1) {}

  // `items`: what stands after the preamble.
  absl::StatusOr<Plan> Run(std::vector<PlanItem> items) {
    plan_.schema = tree_.name;
    plan_.layout = options_.layout;
    items_ = std::move(items);
    EmitModule(0, /*origin=*/0);
    for (const PlanItem& item : items_) {
      if (item.module < 0) {
        PC_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                            item.text.Tokens(schema_.tokenizer()));
        AppendSpan({.start = plan_.next_position, .tokens = std::move(tokens)},
                   &plan_);
      } else {
        EmitModule(item.module, options_.layout == Layout::kSchema
                                    ? module(item.module).schema_start
                                    : plan_.next_position);
      }
    }
    // First: contexts are as long as the positions before them.
    PC_RETURN_IF_ERROR(CheckContext(plan_, options_.context_length));
    AddModules();
    plan_.exactness = ExactnessOf(plan_);
    return std::move(plan_);
  }

 private:
  const SchemaModule& module(int32_t index) const {
    return tree_.modules[static_cast<size_t>(index)];
  }

  // The states that cached spans name, and those that they saw.
  void AddModules() {
    modules_.Add(0);  // the preamble is the first
    FindScaffolds();
    for (PlanSpan& span : plan_.spans) {
      if (span.kind != SpanKind::kCached) continue;
      const int32_t states = co_encoded_[static_cast<size_t>(span.module)];
      span.module = states >= 0 ? states : modules_.Add(span.module);
    }
  }

  // Where members stand next to each other in the plan, nothing between: the
  // scaffold with the most members first, then the first declared.
  void FindScaffolds() {
    std::vector<size_t> place(tree_.modules.size(), items_.size());
    for (size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].module >= 0) {
        place[static_cast<size_t>(items_[i].module)] = i;
      }
    }
    std::vector<const SchemaScaffold*> complete;
    for (const SchemaScaffold& scaffold : tree_.scaffolds) {
      const size_t first = place[static_cast<size_t>(scaffold.modules.front())];
      if (scaffold.modules.size() > items_.size() - first) continue;
      size_t n = 0;
      while (n < scaffold.modules.size() &&
             items_[first + n].module == scaffold.modules[n]) {
        ++n;
      }
      if (n == scaffold.modules.size()) complete.push_back(&scaffold);
    }
    std::sort(complete.begin(), complete.end(),
              [](const SchemaScaffold* a, const SchemaScaffold* b) {
                if (a->modules.size() != b->modules.size()) {
                  return a->modules.size() > b->modules.size();
                }
                return a < b;  // of one array: the order of declaration
              });
    std::vector<bool> taken(tree_.modules.size(), false);
    for (const SchemaScaffold* scaffold : complete) {
      const auto is_taken = [&](int32_t m) {
        return static_cast<bool>(taken[static_cast<size_t>(m)]);
      };
      const std::vector<int32_t>& members = scaffold->modules;
      if (std::any_of(members.begin(), members.end(), is_taken)) continue;
      const std::vector<int32_t> states = modules_.AddScaffold(*scaffold);
      for (size_t i = 0; i < members.size(); ++i) {
        taken[static_cast<size_t>(members[i])] = true;
        co_encoded_[static_cast<size_t>(members[i])] = states[i];
        if (states[i] < 0) continue;
        for (const int32_t member : members) {
          plan_.modules[static_cast<size_t>(states[i])].scaffold.push_back(
              module(member).name);
        }
      }
    }
  }

  // The spans of a module that begins at `origin`, and of what is imported
  // inside it.
  void EmitModule(int32_t index, int32_t origin) {
    const SchemaModule& m = module(index);
    int32_t piece = 0;
    for (const SchemaPart& part : m.parts) {
      switch (part.kind) {
        case SchemaPart::Kind::kText:
          EmitPiece(index, m.pieces[static_cast<size_t>(part.index)], origin,
                    &piece);
          break;
        case SchemaPart::Kind::kParam:
          EmitParam(index, part.index, origin);
          break;
        case SchemaPart::Kind::kModules:
          for (const int32_t child : part.modules) {
            if (!prompt_.imported[static_cast<size_t>(child)]) continue;
            EmitModule(child, origin + module(child).offset_in_parent);
          }
          break;
      }
    }
  }

  void EmitPiece(int32_t index, const Piece& piece, int32_t origin,
                 int32_t* number) {
    if (piece.tokens.empty()) return;
    const SchemaModule& m = module(index);
    PlanSpan span{
        .name = m.path, .start = origin + piece.offset, .tokens = piece.tokens};
    if (m.cached) {
      span.kind = SpanKind::kCached;
      span.module = index;  // of the tree, until AddModules
      span.piece = (*number)++;
    }
    AppendSpan(std::move(span), &plan_);
  }

  void EmitParam(int32_t index, int32_t param_index, int32_t origin) {
    const SchemaModule& m = module(index);
    const SchemaParam& param = m.params[static_cast<size_t>(param_index)];
    const JudgedArgument* argument = prompt_.Argument(index, param_index);
    AppendSpan(
        {.name = absl::StrCat(m.path, ".", param.name),
         .start = origin + param.offset,
         .tokens = argument == nullptr ? param.tokens : argument->tokens},
        &plan_);
  }

  const Schema& schema_;
  const JudgedPrompt& prompt_;
  const SchemaTree& tree_;
  const CompileOptions& options_;
  Plan plan_;
  PlanModules modules_;
  std::vector<PlanItem> items_;
  std::vector<int32_t> co_encoded_;  // by module: states in the plan, or -1
};

}  // namespace

absl::StatusOr<Plan> BuildPlan(const Schema& schema, const JudgedPrompt& prompt,
                               const CompileOptions& options) {
  PC_ASSIGN_OR_RETURN(std::vector<PlanItem> items,
                      OrderPlan(prompt, schema.chat_template()));
  return Builder(schema, prompt, options).Run(std::move(items));
}

absl::StatusOr<Plan> BuildPlan(const Schema& schema, const SchemaTree& tree,
                               std::vector<PlanItem> items,
                               const CompileOptions& options) {
  JudgedPrompt nothing;
  nothing.tree = &tree;
  nothing.imported.resize(tree.modules.size());
  return Builder(schema, nothing, options).Run(std::move(items));
}

absl::Status CheckContext(const Plan& plan, int32_t context_length) {
  const int64_t length = std::max(plan.num_tokens, plan.next_position);
  if (context_length <= 0 || length <= context_length) return absl::OkStatus();
  return PmlError{
      .reason = "PML_CONTEXT_OVERFLOW",
      .source = Source::kPrompt,
      .detail = absl::StrCat(
          "the plan has ", plan.num_tokens, " tokens and reaches position ",
          plan.next_position, "; the model's context is ", context_length),
      .numbers = {{"tokens", plan.num_tokens},
                  {"positions", plan.next_position},
                  {"context", context_length}}}
      .ToStatus();
}

void AppendSpan(PlanSpan span, Plan* plan) {
  if (span.tokens.empty()) return;
  plan->num_tokens += span.num_tokens();
  if (span.kind == SpanKind::kCached) {
    plan->num_cached_tokens += span.num_tokens();
  }
  plan->next_position =
      std::max(plan->next_position, span.start + span.num_tokens());
  plan->spans.push_back(std::move(span));
}

}  // namespace promptcache::pml
