#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_daemon/core/types.h"
#include "cuda/runtime/segment.h"

namespace promptcache::daemon {

// All KV memory of the node: the segments of both tiers and the array of page
// generations, created once and living as long as the daemon. Knows addresses
// and bytes; who owns which page is PageAllocator's affair.
//
// Segment ids are indexes: first all of the device tier, then all of the host
// tier. The sum of a tier's segments is its budget, rounded down to whole
// system pages, and nothing is ever allocated beyond it.
//
// Thread-safe: const after construction but for bytes, which belong to whoever
// the allocator gave the page to, and generation words, which are atomic.
class PagePool {
 public:
  struct Options {
    uint64_t device_bytes = uint64_t{1} << 30;
    uint64_t host_bytes = 0;
    uint64_t segment_bytes = uint64_t{64} << 20;
    // A segment has at most segment_bytes / min_page_bytes pages (the stride of
    // the generation array); layouts with smaller pages waste the rest.
    uint64_t min_page_bytes = 4096;

    absl::Status Validate() const;
  };
  // ResourceExhausted when the machine has not that much memory.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(
      const Options& options);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  uint32_t num_segments() const {
    return static_cast<uint32_t>(segments_.size());
  }
  Tier tier(uint32_t segment) const {
    return segment < num_device_segments_ ? Tier::kDevice : Tier::kHost;
  }
  uint64_t segment_bytes(uint32_t segment) const {
    return segments_[segment].bytes();
  }
  uint64_t tier_bytes(Tier tier) const;
  // For exports; the pool keeps ownership.
  int segment_fd(uint32_t segment) const { return segments_[segment].fd(); }
  // TierStats.kind.
  std::string kind(Tier tier) const;

  // uint64_t[num_segments][generations_stride].
  int generations_fd() const { return generations_.fd(); }
  uint64_t generations_bytes() const { return generations_.bytes(); }
  uint32_t generations_stride() const { return generations_stride_; }

  // How many pages of that size the segment is carved into.
  uint32_t PagesIn(uint32_t segment, uint64_t page_bytes) const;
  std::span<std::byte> Page(uint32_t segment, uint32_t page,
                            uint64_t page_bytes) const {
    return {segments_[segment].base() + page * page_bytes, page_bytes};
  }

  // Writes `generation` to every page of the runs (0: nobody's). Workers see
  // it in their mapping; release order.
  void Stamp(const PageRuns& runs, uint64_t generation) const;
  uint64_t Generation(uint32_t segment, uint32_t page) const;

  // Byte work, never under a lock.
  void Zero(const PageRuns& runs, uint64_t page_bytes) const;
  // Of every page, in run order.
  std::vector<uint64_t> Sums(const PageRuns& runs, uint64_t page_bytes) const;
  // Page i of `to` becomes page i of `from`; returns the copies' sums.
  // REQUIRES: as many pages in both.
  std::vector<uint64_t> Copy(const PageRuns& from, const PageRuns& to,
                             uint64_t page_bytes) const;

 private:
  PagePool() = default;
  uint64_t* GenerationWord(uint32_t segment, uint32_t page) const;

  std::vector<gpu::HostSegment> segments_;
  uint32_t num_device_segments_ = 0;
  gpu::HostSegment generations_;
  uint32_t generations_stride_ = 0;
};

}  // namespace promptcache::daemon
