#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/kv_layout.h"
#include "common/mutex.h"
#include "inference_worker/engine/kv_memory.h"

namespace promptcache::worker {

// The worker's own KV pages: tails (fresh and generated tokens) and everything
// that is computed without the cache. A hard budget, handed out page by page,
// zeroed and aligned to 64 bytes. Thread-safe. Must outlive every use of its
// pages.
//
// On a GPU they are device memory, taken as a whole at once. On the CPU the
// budget is address space: what is held is what was ever in use at one time,
// since pages that were used before are handed out before others. It grows by
// kGrowthBytes in one call each, so that no page fault comes while a request is
// computed, and is kept: the next one finds it there.
class PrivatePages {
 public:
  // A huge page where there are such.
  static constexpr size_t kGrowthBytes = size_t{2} << 20;

  // Never takes more than `capacity_bytes`.
  // InvalidArgument when that is less than one page, ResourceExhausted when the
  // system refuses it.
  // `memory` says where, and must outlive the pool; null: on the CPU.
  static absl::StatusOr<std::unique_ptr<PrivatePages>> Create(
      const KvLayout& layout, uint64_t capacity_bytes,
      KvMemory* memory = nullptr);
  ~PrivatePages();
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;

  // All or nothing. ResourceExhausted, with the numbers, when there are not
  // enough, also when the whole pool is smaller, and when the system has no
  // memory for them.
  absl::StatusOr<std::vector<std::byte*>> Allocate(uint64_t num_pages)
      ABSL_LOCKS_EXCLUDED(mu_);
  // REQUIRES: pages came from Allocate of this pool and were not freed.
  void Free(const std::vector<std::byte*>& pages) ABSL_LOCKS_EXCLUDED(mu_);

  const KvLayout& layout() const { return layout_; }
  KvMemory* memory() const { return memory_; }
  uint64_t capacity_pages() const { return capacity_pages_; }
  // What a page takes of the budget: page_bytes, rounded to a cache line.
  size_t page_stride_bytes() const { return page_stride_bytes_; }
  uint64_t free_pages() const ABSL_LOCKS_EXCLUDED(mu_);
  // The most that were ever handed out at one time.
  uint64_t peak_pages() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  PrivatePages(const KvLayout& layout, uint64_t capacity_pages);
  absl::Status TakeMemory();
  // Makes the first `used_bytes` present.
  absl::Status Grow(size_t used_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  size_t num_bytes() const { return capacity_pages_ * page_stride_bytes_; }

  std::unique_ptr<KvMemory> cpu_;  // when no other was given
  KvMemory* memory_ = nullptr;
  gpu::DeviceBuffer buffer_;  // on a GPU

  const KvLayout layout_;
  const size_t page_stride_bytes_;
  std::byte* base_ = nullptr;
  const uint64_t capacity_pages_;
  mutable Mutex mu_;
  // Those that were never handed out lie at the bottom, the lowest on top.
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
  uint64_t peak_pages_ ABSL_GUARDED_BY(mu_) = 0;
  // Present, from base_ on; all of it on a GPU.
  size_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace promptcache::worker
