#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "inference_worker/engine/backend.h"

namespace promptcache::worker {

// What a pass may ask of a model.
struct PassLimits {
  KvLayout layout;
  uint32_t vocab_size = 0;
  // The largest distance, forwards or backwards, that a rotation table knows.
  int32_t max_distance = 0;
  // Positions that a learned table has; 0: there is no table.
  uint32_t num_positions = 0;
  bool encoder_decoder = false;
  bool chooses_tokens = false;
};

// InvalidArgument, naming the group and the numbers, for anything that a pass
// over `groups` could not compute or that would read or write where it must
// not. A table's length is not known here: its entries are checked for null as
// far as the view says that they are used.
absl::Status CheckRowGroups(std::span<const RowGroup> groups,
                            const PassLimits& limits);

// InvalidArgument, naming the first token that the vocabulary does not have.
absl::Status CheckTokens(std::span<const int32_t> tokens, uint32_t vocab_size);

// Rows of a group that want logits, or a token chosen from them.
size_t NumLogitRows(const RowGroup& group);

}  // namespace promptcache::worker
