#pragma once

#include <cstdint>

#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// What a family's way of telling positions allows with states that are kept.
enum class ReuseRule {
  kAnywhere,  // RoPE, ALiBi: a module moves by a constant offset
  // Learned positions are part of the states: a module stays where its schema
  // has it, and its start is part of its key.
  kInPlace,
  // The rotation depends on the length of the request: nothing is kept.
  kNever,
};

ReuseRule ReuseRuleOf(const ModelConfig& config);

// Tokens that a request may have: the context, or, where longer ones would be
// rotated by other frequencies from the first token on (dynamic NTK, LongRoPE),
// the length up to which the rotation is one and the same.
uint32_t UsableContext(const ModelConfig& config);

}  // namespace promptcache::worker
