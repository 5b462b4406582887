#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/module_acquisition.h"

namespace promptcache::worker {

// What a request with `retain` leaves behind.
struct FinishedTail {
  std::vector<int32_t> tokens;  // the sequence's, up to its last whole chunk
  size_t first_chunk = 0;       // of the tail: the prompt's are before it
  std::span<const std::byte* const> pages;  // of the tail's whole chunks
  // Of the prompt's chunks: what was in the cache before, and what is there now
  // as far as the request knows (read, or committed by it).
  std::vector<bool> read;
  std::vector<bool> cached;
};

struct RetainedTail {
  bool has_prompt = false;  // all of the prompt's chunks are in the cache
  uint32_t chunks = 0;  // of the tail, from its first one on, in the cache now
  std::string notice;   // why not all are, or not as asked; ""
};

// Leaves the whole chunks of a finished request's tail in the cache as
// anonymous modules (prefix_plan.h), by copying: what lies there is what a
// module's pages hold. Not behind a prompt that is not there as a whole. What
// another request is just putting there is waited
// for, a little. Chunks of prompt and tail that were there before stay as long
// as this request's policy says, where they would have gone earlier. REQUIRES:
// the prompt is cut into chunks, a chunk is whole pages. Blocks: runs on the
// executor.
RetainedTail RetainTail(CacheClient* client, const GenerationRequest& request,
                        const AcquisitionOptions& options,
                        const FinishedTail& finished, absl::Time deadline);

}  // namespace promptcache::worker
