#pragma once

#include <cstdint>

#include "common/pml/plan.h"

namespace promptcache::worker {

// Makes a plan one of an encoder-decoder model, in which every module, and
// every run of fresh spans, is a segment that sees nothing but itself: contexts
// go, with the modules that only contexts named, so that a module's key is the
// same wherever it is used. EXACT is then a plan of one segment: all fresh, or
// one module that is one text. `end_id` (Tokenizer::text_end_id; -1: none) ends
// the last run of fresh spans, or stands alone after a module. A plan without
// spans, which is there for its modules, keeps them all.
void SeparateSegments(int32_t end_id, pml::Plan* plan);

}  // namespace promptcache::worker
