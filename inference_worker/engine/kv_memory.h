#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/kv_layout.h"
#include "common/mutex.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/arrival.h"

namespace promptcache::worker {

// What is done to KV pages outside a pass: zeroing, summing, copying in. On the
// CPU by the CPU, on a GPU over a stream of its own. Every method has done its
// work when it returns, and passes must have done theirs: Backend::Forward
// returns when no kernel of it runs any more. Errors name the call of CUDA that
// failed. Thread-safe. Must not outlive its device.
class KvMemory {
 public:
  // Sums pages of the device (`pages` and `sums` are device memory, parallel)
  // in the order of `stream`: the kernel of cuda/kernels/page_sum.
  using SumPages = std::function<absl::Status(
      const std::byte* const* pages, size_t num_pages, size_t page_bytes,
      uint64_t* sums, gpu::Stream* stream)>;
  struct Options {
    gpu::Device* device = nullptr;  // null: the CPU
    SumPages sum_pages;             // empty: pages are copied to the host
  };
  // Equal distances apart: what the unused slots of a page are.
  struct Rows {
    std::byte* first = nullptr;
    size_t pitch = 0;
    size_t width = 0;
    size_t height = 0;
  };

  static absl::StatusOr<std::unique_ptr<KvMemory>> Create(
      const Options& options);
  KvMemory(const KvMemory&) = delete;
  KvMemory& operator=(const KvMemory&) = delete;

  bool on_gpu() const { return options_.device != nullptr; }
  gpu::Device* device() const { return options_.device; }

  absl::Status Zero(std::span<std::byte* const> pages, size_t page_bytes)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Zero(const Rows& rows) ABSL_LOCKS_EXCLUDED(mu_);
  // PageSum of each page. `on_host`: they are in host memory, whatever the
  // device is.
  absl::StatusOr<std::vector<uint64_t>> Sums(
      std::span<const std::byte* const> pages, size_t page_bytes, bool on_host)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Begins to copy pages of the (pinned) host tier into pages of the device,
  // beside what passes do; the only method whose work is not done when it
  // returns. `from` must stay as it is and `to` be nobody else's until the
  // arrival is verified or gone: its destructor waits for the copy. It must not
  // outlive this. REQUIRES: on_gpu().
  absl::StatusOr<std::unique_ptr<Arrival>> StartCopyFromHost(
      std::span<const std::byte* const> from, std::span<std::byte* const> to,
      const KvLayout& layout) ABSL_LOCKS_EXCLUDED(mu_);
  // Pages of the device (or of the CPU's memory) into others of it.
  absl::Status Copy(std::span<const std::byte* const> from,
                    std::span<std::byte* const> to, size_t page_bytes)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit KvMemory(const Options& options) : options_(options) {}
  absl::StatusOr<std::vector<uint64_t>> SumsByKernel(
      std::span<const std::byte* const> pages, size_t page_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::vector<uint64_t>> SumsByCopy(
      std::span<const std::byte* const> pages, size_t page_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Makes staging_ and scratch_ at least so large. They are kept: allocating
  // waits for everything that runs on a GPU.
  absl::Status Reserve(size_t staging_bytes, size_t scratch_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  Mutex mu_;
  gpu::PinnedBuffer staging_ ABSL_GUARDED_BY(mu_);
  gpu::DeviceBuffer scratch_ ABSL_GUARDED_BY(mu_);
  // Null on the CPU.
  std::unique_ptr<gpu::Stream> stream_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<gpu::Stream> arrival_stream_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::worker
