#pragma once

#include <string>
#include <vector>

#include "common/pml/plan.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

struct SchemaTree;

// Tokens never reach over the border of a module or an argument. Where the
// tokenizer would have joined what stands on both sides, the model reads
// pieces that it seldom saw in training: a warning with a hint each, at most
// 20, then how many more there are.

// Borders inside a schema, with every module and param in its place.
std::vector<std::string> SchemaBorders(const SchemaTree& tree,
                                       const Tokenizer& tokenizer);

// Borders between the spans of a plan, which say what a prompt puts beside
// what.
std::vector<std::string> PlanBorders(const Plan& plan,
                                     const Tokenizer& tokenizer);

}  // namespace promptcache::pml
