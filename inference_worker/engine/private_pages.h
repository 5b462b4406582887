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
// that is computed without the cache. One populated allocation with a hard
// budget, handed out page by page, zeroed and aligned to 64 bytes. On a GPU
// they are device memory. Thread-safe. Must outlive every use of its pages.
class PrivatePages {
 public:
  // Takes all its memory now, never more than `capacity_bytes`.
  // InvalidArgument when that is less than one page.
  // `memory` says where, and must outlive the pool; null: on the CPU.
  static absl::StatusOr<std::unique_ptr<PrivatePages>> Create(
      const KvLayout& layout, uint64_t capacity_bytes,
      KvMemory* memory = nullptr);
  ~PrivatePages();
  PrivatePages(const PrivatePages&) = delete;
  PrivatePages& operator=(const PrivatePages&) = delete;

  // All or nothing. ResourceExhausted, with the numbers, when there are not
  // enough, also when the whole pool is smaller.
  absl::StatusOr<std::vector<std::byte*>> Allocate(uint64_t num_pages)
      ABSL_LOCKS_EXCLUDED(mu_);
  // REQUIRES: pages came from Allocate of this pool and were not freed.
  void Free(const std::vector<std::byte*>& pages) ABSL_LOCKS_EXCLUDED(mu_);

  const KvLayout& layout() const { return layout_; }
  KvMemory* memory() const { return memory_; }
  uint64_t capacity_pages() const { return capacity_pages_; }
  uint64_t free_pages() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  PrivatePages(const KvLayout& layout, uint64_t capacity_pages);
  absl::Status TakeMemory();

  std::unique_ptr<KvMemory> cpu_;  // when no other was given
  KvMemory* memory_ = nullptr;
  gpu::DeviceBuffer buffer_;  // on a GPU

  const KvLayout layout_;
  const size_t page_stride_bytes_;  // page_bytes, rounded to a cache line
  std::byte* base_ = nullptr;
  const uint64_t capacity_pages_;
  mutable Mutex mu_;
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::worker
