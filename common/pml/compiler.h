#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/pml/conversation.h"
#include "common/pml/limits.h"
#include "common/pml/plan.h"
#include "common/pml/prompt.h"
#include "common/pml/schema.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

struct CompileOptions {
  Layout layout = Layout::kCompact;
  // Of the model, in tokens: neither a plan's positions nor its tokens go
  // past it. 0: not checked.
  int32_t context_length = 8192;
  // Of prompts without a schema: their bytes. Others were read within limits.
  Limits limits;
};

// Judges the prompt against the schema and lays the plan out. A PmlError of
// source prompt when it is refused. Thread-safe; no module is tokenised here.
absl::StatusOr<Plan> Compile(const Schema& schema, const Prompt& prompt,
                             const CompileOptions& options = {});

// A plan of modules only, to encode them ahead of use: no spans. `paths` as in
// Schema::Modules(), with what their contexts need; a scaffold's co-encoded
// members when all of them are named. Empty: every cached module and every
// scaffold. NotFound for an unknown path, FailedPrecondition for a module with
// cache="false". A module that no plan within `context_length` (0: any) can
// hold is left out; when it is named, PML_CONTEXT_OVERFLOW.
absl::StatusOr<Plan> CompileWarm(const Schema& schema,
                                 std::span<const std::string> paths,
                                 int32_t context_length = 0);

// Prompts without a schema: BOS and fresh text, no modules.
absl::StatusOr<Plan> CompileText(std::string_view text,
                                 const Tokenizer& tokenizer,
                                 const CompileOptions& options = {});

// As the model's own chat template renders the list, white space and default
// system message included, then what asks for the assistant's answer.
absl::StatusOr<Plan> CompileMessages(std::span<const ChatMessage> messages,
                                     const Tokenizer& tokenizer,
                                     const ChatTemplate& chat_template,
                                     const CompileOptions& options = {});

}  // namespace promptcache::pml
