#pragma once

#include <cstddef>
#include <vector>

#include "common/pml/plan.h"

namespace promptcache::worker {

// Indices of the module and of all that it saw, directly or not, ascending;
// the module is the last.
std::vector<size_t> WithContext(const pml::Plan& plan, size_t module);

// A plan of those modules alone, without spans. REQUIRES: `members` is closed
// under contexts and ascends.
pml::Plan ModulesOnly(const pml::Plan& plan,
                      const std::vector<size_t>& members);

}  // namespace promptcache::worker
