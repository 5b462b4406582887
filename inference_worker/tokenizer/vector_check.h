#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "common/tokenizer.h"

namespace promptcache::worker {

// Holds a tokenizer against a file of vectors: a JSON object a line, as
// tests/data/tokenizer/README.md describes them. One result a line.
// InvalidArgument, with the line, for what is not in that form.
absl::StatusOr<std::vector<CaseResult>> CheckTokenizerVectors(
    std::string_view jsonl_text, const Tokenizer& tokenizer);

}  // namespace promptcache::worker
