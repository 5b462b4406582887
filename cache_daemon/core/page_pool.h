#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_daemon/core/types.h"
#include "common/mutex.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/layered_copy.h"
#include "cuda/runtime/segment.h"

namespace promptcache::daemon {

// All KV memory of a node: the segments of one device tier for each device, of
// the one host tier, and the array of page generations, created once and living
// as long as the daemon. Knows addresses and bytes; who owns which page is
// PageAllocator's affair.
//
// Devices are numbered as they were given. Segment ids are indexes: the first
// device's segments, the next one's, and so on, then the host's. The sum of a
// tier's segments is its budget, rounded down to whole system pages (GPU: to
// 2 MiB), and nothing is ever allocated beyond it.
//
// On GPUs device tiers are GPU memory, which the CPU cannot touch, and the host
// tier is pinned for all of them. Copies go over streams of the pool, whole
// runs at once; each device has its own, so that none waits for another's.
//
// Thread-safe: const after construction but for bytes, which belong to whoever
// the allocator gave the page to, generation words, which are atomic, and
// streams, which have a lock each.
class PagePool {
 public:
  struct Options {
    uint64_t device_bytes = uint64_t{1} << 30;  // of each device
    uint64_t host_bytes = 0;
    uint64_t segment_bytes = uint64_t{64} << 20;
    // A segment has at most segment_bytes / min_page_bytes pages (the stride of
    // the generation array); layouts with smaller pages waste the rest.
    uint64_t min_page_bytes = 4096;
    // Where the device tiers lie: all GPUs or all CPUs; empty: the CPU. Must
    // outlive the pool.
    std::vector<gpu::Device*> devices;
    // How a GPU's segments are exported: these kinds in turn. Empty: as
    // descriptors where the GPU can, else by CUDA IPC.
    std::vector<gpu::HandleKind> handles;
    // What the CPU's tiers may take in all. Unset: what the machine and the
    // groups that the process is in have left, and reserved huge pages.
    std::optional<uint64_t> available_bytes;

    absl::Status Validate() const;
    // Of the CPU's memory: the host tier, and device tiers without a GPU.
    // UINT64_MAX when it does not fit in 64 bits.
    uint64_t cpu_bytes() const;
  };
  // ResourceExhausted when the machine has not that much memory, in all: told
  // before any is taken.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(
      const Options& options);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  uint32_t num_segments() const {
    return static_cast<uint32_t>(segments_.size());
  }
  uint32_t num_devices() const {
    return static_cast<uint32_t>(devices_.size());
  }
  Tier tier(uint32_t segment) const { return places_[segment].tier; }
  // Whose tier the segment is in; 0 for the host tier.
  uint32_t device(uint32_t segment) const { return places_[segment].device; }
  uint64_t segment_bytes(uint32_t segment) const {
    return segments_[segment]->num_bytes();
  }
  // Here and below `device` counts for the device tier alone.
  uint64_t tier_bytes(Tier tier, uint32_t device = 0) const;
  // For exports; the pool keeps ownership.
  const gpu::SharedSegment& segment(uint32_t segment) const {
    return *segments_[segment];
  }
  const gpu::DeviceInfo& device_info(uint32_t device = 0) const {
    return devices_[device]->info();
  }
  bool on_gpu() const { return devices_.front()->is_cuda(); }
  // What a reader of this tier must be able to import, without repetition.
  std::vector<gpu::HandleKind> handle_kinds(Tier tier,
                                            uint32_t device = 0) const;
  bool mapped_read_only(Tier tier, uint32_t device = 0) const;
  // TierStats.kind: "cpu memfd, plain pages", "cuda".
  std::string kind(Tier tier, uint32_t device = 0) const;

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

  // Progress words lie behind the generations; word 0 is nobody's.
  uint64_t progress_words_begin() const {
    return uint64_t{num_segments()} * generations_stride_;
  }
  static constexpr uint32_t kNumProgressWords = 512;
  // Workers see it in their mapping; release order. A value of
  // common/progress_word.h.
  void SetProgress(uint32_t word, uint64_t value) const;
  uint64_t Progress(uint32_t word) const;

  // Byte work, never under a lock of others. All of it is done when they
  // return; an error names the call of CUDA that failed. The runs of a call are
  // of one tier.
  absl::Status Zero(const PageRuns& runs, uint64_t page_bytes) const;
  // Of every page, in run order. GPU pages are copied to the host for it.
  absl::StatusOr<std::vector<uint64_t>> Sums(const PageRuns& runs,
                                             uint64_t page_bytes) const;
  // Page i of `to` becomes page i of `from`; returns the sums of what was
  // copied, taken of the bytes on the host: the copies', but the originals'
  // where the copies are on a GPU. REQUIRES: as many pages in both, one of
  // them in the host tier.
  absl::StatusOr<std::vector<uint64_t>> Copy(const PageRuns& from,
                                             const PageRuns& to,
                                             uint64_t page_bytes) const;
  // The same to a GPU's tier in groups of layers, beside other copies:
  // `arrived` is told how many layers can be read, rising, on this thread.
  // REQUIRES: `from` is of the host tier.
  absl::StatusOr<std::vector<uint64_t>> CopyByLayers(
      const PageRuns& from, const PageRuns& to, const PageShape& shape,
      absl::FunctionRef<void(uint32_t)> arrived) const;

 private:
  struct Lane {
    Mutex mu;
    std::unique_ptr<gpu::Stream> stream ABSL_PT_GUARDED_BY(mu);
  };
  // Of one device: one for zeroing, which answers to workers wait for, one for
  // moves, and one for what readers wait for.
  struct Lanes {
    Lane zero;
    Lane copy;
    Lane arrival;
  };
  struct PlaceOfSegment {
    Tier tier = Tier::kNone;
    uint32_t device = 0;
  };

  PagePool() = default;
  absl::Status AddTier(const char* name, uint64_t tier_bytes,
                       const Options& options, PlaceOfSegment place);
  bool In(uint32_t segment, Tier tier, uint32_t device) const {
    return places_[segment].tier == tier &&
           (tier == Tier::kHost || places_[segment].device == device);
  }
  uint64_t* GenerationWord(uint32_t segment, uint32_t page) const;
  std::byte* Address(const PageRun& run, uint64_t page_bytes) const {
    return Page(run.segment, run.first_page, page_bytes).data();
  }
  absl::StatusOr<std::vector<uint64_t>> QueueAndSum(
      gpu::Device& device, gpu::Stream& stream,
      std::span<const gpu::PageStretch> stretches, const PageShape& shape,
      absl::FunctionRef<void(uint32_t)> arrived) const;
  absl::Status SumsFromDevice(const PageRun& run, uint64_t page_bytes,
                              std::vector<uint64_t>* sums) const;

  std::unique_ptr<gpu::Device> cpu_;  // when no other was given
  std::vector<gpu::Device*> devices_;
  std::vector<std::unique_ptr<gpu::SharedSegment>> segments_;
  std::vector<PlaceOfSegment> places_;         // parallel
  std::vector<gpu::Pinning> pinnings_;         // of the host tier, on GPUs
  std::vector<std::unique_ptr<Lanes>> lanes_;  // of each device
  gpu::HostSegment generations_;
  uint32_t generations_stride_ = 0;
};

}  // namespace promptcache::daemon
