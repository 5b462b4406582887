#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/time/time.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/module_acquisition.h"

namespace promptcache::worker {

struct RetainedTail {
  uint32_t chunks = 0;  // of the tail, from its first one on, in the cache now
  std::string notice;   // why not all are; ""
};

// Leaves the whole chunks of a finished request's tail in the cache as
// anonymous modules (prefix_plan.h), by copying: what lies there is what a
// module's pages hold. `tokens` are the sequence's up to the tail's last whole
// chunk, `pages` the tail's from chunk `first_chunk` on. REQUIRES: the prompt
// is cut into chunks, a chunk is whole pages. Blocks: runs on the executor.
RetainedTail RetainTail(CacheClient* client, const GenerationRequest& request,
                        const AcquisitionOptions& options,
                        std::span<const int32_t> tokens, size_t first_chunk,
                        std::span<const std::byte* const> pages,
                        absl::Time deadline);

}  // namespace promptcache::worker
