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
  std::vector<bool> read;  // the prompt's chunks that were in the cache before
};

struct RetainedTail {
  uint32_t chunks = 0;  // of the tail, from its first one on, in the cache now
  std::string notice;   // why not all are, or not as asked; ""
};

// Leaves the whole chunks of a finished request's tail in the cache as
// anonymous modules (prefix_plan.h), by copying: what lies there is what a
// module's pages hold. What another request is just putting there is waited
// for, a little. Chunks of prompt and tail that were there before stay as long
// as this request's policy says, where they would have gone earlier. REQUIRES:
// the prompt is cut into chunks, a chunk is whole pages. Blocks: runs on the
// executor.
RetainedTail RetainTail(CacheClient* client, const GenerationRequest& request,
                        const AcquisitionOptions& options,
                        const FinishedTail& finished, absl::Time deadline);

}  // namespace promptcache::worker
