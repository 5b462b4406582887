#include "common/pml/compiler.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/pml/conversation.h"
#include "common/pml/exactness.h"
#include "common/pml/marked_text.h"
#include "common/pml/names.h"
#include "common/pml/plan_builder.h"
#include "common/pml/plan_modules.h"
#include "common/pml/prompt_judge.h"
#include "common/pml/xml.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

absl::Status CheckBytes(size_t num_bytes, const CompileOptions& options) {
  return CheckLimit(Source::kPrompt, "document bytes",
                    static_cast<int64_t>(num_bytes),
                    options.limits.prompt_bytes);
}

absl::StatusOr<Plan> FreshPlan(const MarkedText& text,
                               const Tokenizer& tokenizer,
                               const CompileOptions& options) {
  Plan plan;
  plan.layout = options.layout;
  PC_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, text.Tokens(tokenizer));
  if (tokenizer.bos_id() >= 0) {
    tokens.insert(tokens.begin(), tokenizer.bos_id());
  }
  AppendSpan({.tokens = std::move(tokens)}, &plan);
  PC_RETURN_IF_ERROR(CheckContext(plan, options.context_length));
  plan.exactness = ExactnessOf(plan);
  return plan;
}

// The module of `path`, the preamble and anonymous modules included; -1: none.
int32_t FindAny(const SchemaTree& tree, const std::string& path) {
  if (path.empty()) return 0;
  if (path.front() != '#') return tree.Find(path);
  const auto it = std::find_if(
      tree.modules.begin(), tree.modules.end(),
      [&](const SchemaModule& m) { return !m.named && m.path == path; });
  return it == tree.modules.end()
             ? -1
             : static_cast<int32_t>(it - tree.modules.begin());
}

// Where the module's last token stands at the earliest, plus one: after the
// preamble, in its block.
int64_t EndInPlan(const SchemaTree& tree, int32_t index) {
  int64_t end = 0;
  const SchemaModule& m = tree.modules[static_cast<size_t>(index)];
  for (const Piece& piece : m.pieces) {
    if (piece.tokens.empty()) continue;
    end = piece.offset + static_cast<int64_t>(piece.tokens.size());
  }
  if (index == 0) return end;
  for (int32_t i = index; i >= 0;) {
    const SchemaModule& inner = tree.modules[static_cast<size_t>(i)];
    end += inner.offset_in_parent;
    i = inner.parent;
  }
  return end + tree.modules.front().length;
}

absl::Status ModulePastContext(const std::string& path, int64_t end,
                               int32_t context_length) {
  return PmlError{
      .reason = "PML_CONTEXT_OVERFLOW",
      .source = Source::kSchema,
      .detail = absl::StrCat("module \"", path, "\" reaches position ", end,
                             "; the model's context is ", context_length),
      .numbers = {{"positions", end}, {"context", context_length}}}
      .ToStatus();
}

absl::StatusOr<std::vector<bool>> WantedModules(
    const SchemaTree& tree, std::span<const std::string> paths) {
  std::vector<bool> wanted(tree.modules.size(), paths.empty());
  for (const std::string& path : paths) {
    const int32_t index = FindAny(tree, path);
    if (index < 0) {
      return absl::NotFoundError(absl::StrCat(
          "schema \"", tree.name, "\" has no module \"", path, "\""));
    }
    if (!tree.modules[static_cast<size_t>(index)].cached) {
      return absl::FailedPreconditionError(absl::StrCat(
          "module \"", path, "\" of schema \"", tree.name,
          "\" has cache=\"false\": it is computed fresh each time"));
    }
    wanted[static_cast<size_t>(index)] = true;
  }
  return wanted;
}

}  // namespace

absl::StatusOr<Plan> Compile(const Schema& schema, const Prompt& prompt,
                             const CompileOptions& options) {
  PC_ASSIGN_OR_RETURN(const JudgedPrompt judged, JudgePrompt(schema, prompt));
  return BuildPlan(schema, judged, options);
}

absl::StatusOr<Plan> CompileWarm(const Schema& schema,
                                 std::span<const std::string> paths,
                                 int32_t context_length) {
  const SchemaTree& tree = schema.tree(/*prompt_has_roles=*/false);
  PC_ASSIGN_OR_RETURN(const std::vector<bool> wanted,
                      WantedModules(tree, paths));
  Plan plan;
  plan.schema = tree.name;
  PlanModules modules(tree, &plan);
  for (size_t i = 0; i < tree.modules.size(); ++i) {
    if (!wanted[i] || !tree.modules[i].cached) continue;
    const int32_t index = static_cast<int32_t>(i);
    const int64_t end = EndInPlan(tree, index);
    if (context_length <= 0 || end <= context_length) {
      modules.Add(index);
    } else if (!paths.empty()) {
      return ModulePastContext(tree.modules[i].path, end, context_length);
    }
  }
  for (const SchemaScaffold& scaffold : tree.scaffolds) {
    int64_t end = tree.modules.front().length;
    bool complete = true;
    for (const int32_t m : scaffold.modules) {
      end += tree.modules[static_cast<size_t>(m)].length;
      complete = complete && wanted[static_cast<size_t>(m)];
    }
    if (context_length > 0 && end > context_length) continue;
    if (!complete) continue;
    const size_t first = plan.modules.size();
    modules.AddScaffold(scaffold);
    // The first member's states, which are its own, were there already.
    for (size_t i = first; i < plan.modules.size(); ++i) {
      plan.modules[i].scaffold = absl::StrSplit(scaffold.names, ' ');
    }
  }
  return plan;
}

absl::StatusOr<Plan> CompileText(std::string_view text,
                                 const Tokenizer& tokenizer,
                                 const CompileOptions& options) {
  PC_RETURN_IF_ERROR(CheckBytes(text.size(), options));
  MarkedText marked;
  marked.AppendText(text);
  return FreshPlan(marked, tokenizer, options);
}

absl::StatusOr<Plan> CompileMessages(std::span<const ChatMessage> messages,
                                     const Tokenizer& tokenizer,
                                     const ChatTemplate& chat_template,
                                     const CompileOptions& options) {
  size_t num_bytes = 0;
  for (const ChatMessage& message : messages) {
    num_bytes += message.role.size() + message.content.size();
    PC_RETURN_IF_ERROR(CheckBytes(num_bytes, options));
  }
  PC_ASSIGN_OR_RETURN(const MarkedText marked,
                      MarkConversation(messages, chat_template));
  return FreshPlan(marked, tokenizer, options);
}

}  // namespace promptcache::pml
