#pragma once

#include "common/pml/plan.h"

namespace promptcache::pml {

// EXACT when positions run from 0 without a gap along the plan and every
// cached token saw exactly the tokens before it in the plan, by value, at the
// same distances: then the states are those of full attention.
Exactness ExactnessOf(const Plan& plan);

}  // namespace promptcache::pml
