#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_daemon/core/types.h"
#include "common/mutex.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/segment.h"

namespace promptcache::daemon {

// All KV memory of a device: the segments of both tiers and the array of page
// generations, created once and living as long as the daemon. Knows addresses
// and bytes; who owns which page is PageAllocator's affair.
//
// Segment ids are indexes: first all of the device tier, then all of the host
// tier. The sum of a tier's segments is its budget, rounded down to whole
// system pages (GPU: to 2 MiB), and nothing is ever allocated beyond it.
//
// On a GPU the device tier is GPU memory, which the CPU cannot touch, and the
// host tier is pinned. Copies go over streams of the pool, whole runs at once.
//
// Thread-safe: const after construction but for bytes, which belong to whoever
// the allocator gave the page to, generation words, which are atomic, and
// streams, which have a lock each.
class PagePool {
 public:
  struct Options {
    uint64_t device_bytes = uint64_t{1} << 30;
    uint64_t host_bytes = 0;
    uint64_t segment_bytes = uint64_t{64} << 20;
    // A segment has at most segment_bytes / min_page_bytes pages (the stride of
    // the generation array); layouts with smaller pages waste the rest.
    uint64_t min_page_bytes = 4096;
    // Where the device tier lies; null: the CPU. Must outlive the pool.
    gpu::Device* device = nullptr;
    // How a GPU's segments are exported: these kinds in turn. Empty: as
    // descriptors where the GPU can, else by CUDA IPC.
    std::vector<gpu::HandleKind> handles;

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
    return segments_[segment]->num_bytes();
  }
  uint64_t tier_bytes(Tier tier) const;
  // For exports; the pool keeps ownership.
  const gpu::SharedSegment& segment(uint32_t segment) const {
    return *segments_[segment];
  }
  const gpu::DeviceInfo& device_info() const { return device_->info(); }
  bool on_gpu() const { return device_->is_cuda(); }
  // What a reader of this tier must be able to import, without repetition.
  std::vector<gpu::HandleKind> handle_kinds(Tier tier) const;
  bool mapped_read_only(Tier tier) const;
  // TierStats.kind: "cpu memfd, plain pages", "cuda".
  std::string kind(Tier tier) const;

  // uint64_t[num_segments][generations_stride].
  int generations_fd() const { return generations_.fd(); }
  uint64_t generations_bytes() const { return generations_.bytes(); }
  uint32_t generations_stride() const { return generations_stride_; }

  // How many pages of that size the segment is carved into.
  uint32_t PagesIn(uint32_t segment, uint64_t page_bytes) const;
  // The address is the device's where the tier is a GPU's.
  std::span<std::byte> Page(uint32_t segment, uint32_t page,
                            uint64_t page_bytes) const {
    return {segments_[segment]->base() + page * page_bytes, page_bytes};
  }

  // Writes `generation` to every page of the runs (0: nobody's). Workers see
  // it in their mapping; release order.
  void Stamp(const PageRuns& runs, uint64_t generation) const;
  uint64_t Generation(uint32_t segment, uint32_t page) const;

  // Byte work, never under a lock of others. All of it is done when they
  // return; an error names the call of CUDA that failed.
  absl::Status Zero(const PageRuns& runs, uint64_t page_bytes) const;
  // Of every page, in run order. GPU pages are copied to the host for it.
  absl::StatusOr<std::vector<uint64_t>> Sums(const PageRuns& runs,
                                             uint64_t page_bytes) const;
  // Page i of `to` becomes page i of `from`; returns the sums of what was
  // copied, taken of the bytes on the host: the copies', but the originals'
  // where the copies are on a GPU. REQUIRES: as many pages in both.
  absl::StatusOr<std::vector<uint64_t>> Copy(const PageRuns& from,
                                             const PageRuns& to,
                                             uint64_t page_bytes) const;

 private:
  // One for zeroing, which answers to workers wait for, and one for moves.
  struct Lane {
    Mutex mu;
    std::unique_ptr<gpu::Stream> stream ABSL_PT_GUARDED_BY(mu);
  };

  PagePool() = default;
  absl::Status AddTier(const char* name, uint64_t tier_bytes,
                       const Options& options, Tier tier);
  uint64_t* GenerationWord(uint32_t segment, uint32_t page) const;
  std::byte* Address(const PageRun& run, uint64_t page_bytes) const {
    return Page(run.segment, run.first_page, page_bytes).data();
  }
  absl::Status SumsFromDevice(const PageRun& run, uint64_t page_bytes,
                              std::vector<uint64_t>* sums) const;

  std::unique_ptr<gpu::Device> cpu_;  // when no other was given
  gpu::Device* device_ = nullptr;
  std::vector<std::unique_ptr<gpu::SharedSegment>> segments_;
  std::vector<gpu::Pinning> pinnings_;  // of the host tier, on a GPU
  mutable Lane zero_lane_;
  mutable Lane copy_lane_;
  uint32_t num_device_segments_ = 0;
  gpu::HostSegment generations_;
  uint32_t generations_stride_ = 0;
};

}  // namespace promptcache::daemon
