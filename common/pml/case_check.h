#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

// Compiles every case of a file of PML vectors (tests/data/pml/README.md) and
// compares with what it expects. InvalidArgument when the file is not one.
// `tokenizer` is the one that the file names; its template is looked up by
// name.
absl::StatusOr<std::vector<CaseResult>> CheckPmlCases(
    std::string_view json_text, const Tokenizer& tokenizer);

}  // namespace promptcache::pml
