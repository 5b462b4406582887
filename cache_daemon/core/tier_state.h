#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "cache_daemon/core/entry.h"
#include "cache_daemon/core/page_allocator.h"

namespace promptcache::daemon {

// One tier, of a device or the host: its pages, and in which order its modules
// would be evicted.
// Thread-compatible.
class TierState {
 public:
  // `device`: as for PagePool.
  TierState(const PagePool* pool, Tier tier, uint32_t device,
            absl::Duration tie_window);

  PageAllocator& pages() { return pages_; }
  const PageAllocator& pages() const { return pages_; }
  Tier tier() const { return tier_; }

  void LruAdd(Entry* entry);
  void LruRemove(Entry* entry);

  // Calls `evict` on one module after another (it must free the pages) until
  // `num_pages` pages of that size are free. Same page size: the victims of
  // LruList. Another page size: all modules of a segment, when all of them may
  // go and the latest used is older than the victim of the right size.
  // False, and nobody goes, when there cannot be room.
  bool MakeRoom(uint64_t num_pages, uint64_t page_bytes,
                absl::FunctionRef<void(Entry*)> evict);
  // The next to demote, whatever its page size.
  Entry* Oldest() const;

  uint64_t lru_entries() const;

 private:
  struct Segment {
    uint32_t id = 0;
    absl::Time newest_use = absl::InfinitePast();
    uint64_t num_pages = 0;  // of the page size asked for
  };
  // Segments of other page sizes that could be emptied, longest unused first.
  std::vector<Segment> Stealable(uint64_t page_bytes) const;
  Entry* Victim(uint64_t page_bytes) const;
  uint64_t EvictablePages(uint64_t page_bytes) const;

  const PagePool* const pool_;
  const Tier tier_;
  const uint32_t device_;
  const absl::Duration tie_window_;
  PageAllocator pages_;
  std::map<uint64_t, LruList> lru_;  // by page size
};

}  // namespace promptcache::daemon
