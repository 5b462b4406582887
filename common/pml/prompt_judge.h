#pragma once

// Inside common/pml: a prompt, judged against a schema.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/pml/prompt.h"
#include "common/pml/schema.h"
#include "common/pml/schema_tree.h"

namespace promptcache::pml {

// One step of a prompt in its order.
struct JudgedStep {
  enum class Kind { kText, kBlock, kRoleBegin, kRoleEnd };
  Kind kind = Kind::kText;
  std::string_view text;    // kText: of the Prompt, which must outlive this
  int32_t module = -1;      // kBlock: its outermost module
  Role role = Role::kUser;  // kRoleBegin
  // kRoleBegin: the schema's message that its imports belong to, or -1.
  int32_t message = -1;
};

// What an import gives a param.
struct JudgedArgument {
  int32_t module = -1;
  int32_t param = -1;
  std::string_view text;  // of the Prompt
  std::vector<int32_t> tokens;
};

struct JudgedPrompt {
  const SchemaTree* tree = nullptr;
  std::vector<JudgedStep> steps;
  std::vector<bool> imported;  // by module
  std::vector<JudgedArgument> arguments;
  // (module, param) -> index into arguments.
  absl::flat_hash_map<std::pair<int32_t, int32_t>, size_t> argument_index;

  // Null: the param takes its scaffold text.
  const JudgedArgument* Argument(int32_t module, int32_t param) const;
};

// Finds the first fault in document order, then what only the whole shows.
// Neither `schema` nor `prompt` may go before the result.
absl::StatusOr<JudgedPrompt> JudgePrompt(const Schema& schema,
                                         const Prompt& prompt);

}  // namespace promptcache::pml
