#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/status/status.h"
#include "cache_daemon/core/page_pool.h"

namespace promptcache::daemon {

// Base of what pages belong to, so that the allocator can name owners without
// knowing them.
struct PageOwner {};

// Which pages of one tier's segments are free, and whose the others are.
//
// A segment is carved for one page size while any of its pages is used, and
// for none when it is empty. N free pages of a page size can always be had,
// in however many runs: best fit first, then an empty segment, then the
// largest pieces there are.
//
// Every page remembers the isolation domain of the bytes that lie in it, so
// that Allocate can say which pages must be zeroed before anybody of another
// domain sees them. Fresh memory is zero and belongs to no domain.
//
// Invariants, checked by CheckInvariants(): a page is either free and in
// exactly one free range, or owned; neighbouring free ranges are merged; an
// empty segment is carved for nothing; counts add up.
// Thread-compatible. Touches no page's bytes.
class PageAllocator {
 public:
  // `pool` must outlive it. `device`: as for PagePool.
  PageAllocator(const PagePool* pool, Tier tier, uint32_t device = 0);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  struct Allocation {
    PageRuns runs;
    PageRuns must_zero;  // those of the runs' pages
  };
  // nullopt when fewer than `num_pages` are free; nothing changes then.
  // REQUIRES: num_pages > 0, page_bytes > 0.
  std::optional<Allocation> Allocate(uint64_t num_pages, uint64_t page_bytes,
                                     uint64_t domain, PageOwner* owner);
  void Free(const PageRuns& runs);
  // Whose bytes these used pages hold is not known: of must_zero, when they
  // were neither zeroed nor written in full. Who gets them next has them
  // zeroed.
  void ForgetDomain(const PageRuns& runs);

  // Pages of that size that Allocate could give now, empty segments included.
  uint64_t FreePages(uint64_t page_bytes) const;
  // Pages of that size in the whole tier, were it empty.
  uint64_t TotalPages(uint64_t page_bytes) const;
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint32_t num_segments() const {
    return static_cast<uint32_t>(segments_.size());
  }
  uint64_t LargestFreeRunBytes() const;

  // For taking a whole segment from another page size.
  uint64_t num_carvings() const { return carvings_.size(); }
  uint32_t first_segment() const { return first_segment_; }
  // 0: empty.
  uint64_t page_bytes(uint32_t segment) const;
  // Owners of a segment's used pages, in page order, repeated.
  std::vector<PageOwner*> Owners(uint32_t segment) const;

  // Internal when an invariant does not hold.
  absl::Status CheckInvariants() const;

 private:
  struct PageInfo {
    PageOwner* owner = nullptr;
    uint64_t domain = 0;
  };
  struct Segment {
    uint64_t bytes = 0;
    uint64_t page_bytes = 0;         // 0: empty
    uint64_t carved_page_bytes = 0;  // of the last carving: of `pages`
    uint32_t used_pages = 0;
    std::vector<PageInfo> pages;
    absl::btree_map<uint32_t, uint32_t> free;  // first page -> pages
  };
  // Free ranges of one page size, by length: {pages, segment, first page}.
  using Range = std::tuple<uint32_t, uint32_t, uint32_t>;
  struct Carving {
    absl::btree_set<Range> by_length;
    uint64_t free_pages = 0;
    uint32_t num_segments = 0;
  };

  Segment& At(uint32_t segment) { return segments_[segment - first_segment_]; }
  const Segment& At(uint32_t segment) const {
    return segments_[segment - first_segment_];
  }
  // The empty segment with the most pages of that size; nullopt: none.
  std::optional<uint32_t> BestEmpty(uint64_t page_bytes) const;
  void Carve(uint32_t segment, uint64_t page_bytes);
  void AddRange(uint32_t segment, uint32_t first, uint32_t num_pages);
  void RemoveRange(uint32_t segment, uint32_t first, uint32_t num_pages);
  // Takes the head of a free range.
  PageRun Take(const Range& range, uint64_t num_pages);
  void Own(const PageRun& run, uint64_t domain, PageOwner* owner,
           PageRuns* must_zero);
  void FreeRun(const PageRun& run);
  void ReleaseIfEmpty(uint32_t segment);

  const PagePool* const pool_;
  uint32_t first_segment_ = 0;
  uint64_t capacity_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  std::vector<Segment> segments_;
  std::map<uint64_t, Carving> carvings_;  // by page size; none is empty
  std::set<uint32_t> empty_;
};

}  // namespace promptcache::daemon
