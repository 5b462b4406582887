#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/families/reuse.h"
#include "inference_worker/engine/private_pages.h"

namespace promptcache::worker {

// How far reused states are from computed ones on a loaded model: root mean
// square of the differences between logits over that of the logits.
struct ReuseErrors {
  // A module's states beside fresh text, against one sequence.
  double in_place = 0;
  // The same moved by a constant offset, against states computed there. 0
  // where modules never move.
  double moved = 0;
  // Of both: keys are rounded to bf16 in another frame, no more.
  double tolerance = 0;

  bool ok() const;  // false for NaN
  std::string ToString() const;
};

// The correctness gate: runs a built-in token sequence of at most 64 tokens
// three times. Of an encoder-decoder: what the decoder makes of a module
// encoded in a pass of its own, and of one that stands elsewhere in the plan,
// where nothing may differ but orders of summation. Errors are the backend's or
// the pool's; InvalidArgument for a context too short to tell anything (16
// tokens).
absl::StatusOr<ReuseErrors> CheckReuse(Backend& backend, PrivatePages& pages,
                                       ReuseRule rule);

}  // namespace promptcache::worker
