#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

// Holds the chat templates against a file of conversations as others rendered
// them (tests/data/chat_template/README.md). InvalidArgument when the file is
// not one. `tokenizer`: of the vocabulary that the file's name says; null where
// no case has ids.
absl::StatusOr<std::vector<CaseResult>> CheckConversations(
    std::string_view json_text, const Tokenizer* tokenizer);

}  // namespace promptcache::pml
