#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/pml/error.h"
#include "common/pml/plan.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

// {"exactness","tokens","cached_tokens","spans":[...]}: the form that the
// vectors have as `expect` (tests/data/pml/README.md). One line.
std::string PlanToJson(const Plan& plan);
// With "warnings", where the tokenizer would have joined what a border splits.
std::string PlanToJson(const Plan& plan, const Tokenizer& tokenizer);

// {"error":{"reason","in","line","column","message"}} and the numbers that the
// message has ("tokens", "limit", ...); no line or column where there is no
// place.
std::string ErrorToJson(const PmlError& error);

// For people: a table of spans (positions, tokens, cached or fresh), totals,
// exactness, and borders where the tokenizer would have joined.
std::string PlanToTable(const Plan& plan, const Tokenizer& tokenizer);

}  // namespace promptcache::pml
