#pragma once

#include "common/pml/plan.h"

namespace promptcache::worker {

// Makes a plan one of an encoder-decoder model, in which every module, and
// every run of fresh spans, is a segment that sees nothing but itself: contexts
// go, with the modules that only contexts named, so that a module's key is the
// same wherever it is used. EXACT is then a plan of one segment: all fresh, or
// one module that is one text.
void SeparateSegments(pml::Plan* plan);

}  // namespace promptcache::worker
