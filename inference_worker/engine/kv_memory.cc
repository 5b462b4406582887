#include "inference_worker/engine/kv_memory.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/page_sum.h"
#include "common/status_macros.h"
#include "cuda/runtime/layered_copy.h"

namespace promptcache::worker {
namespace {

// What is copied at once where there is no kernel that sums.
constexpr size_t kStagingBytes = size_t{8} << 20;

// Calls fn(first, count) for the longest stretches that lie side by side.
template <typename Page, typename Fn>
absl::Status ForEachStretch(std::span<Page* const> pages, size_t page_bytes,
                            Fn fn) {
  for (size_t first = 0; first < pages.size();) {
    size_t end = first + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + page_bytes) {
      ++end;
    }
    PC_RETURN_IF_ERROR(fn(first, end - first));
    first = end;
  }
  return absl::OkStatus();
}

// The same where they lie side by side on both sides.
template <typename Fn>
absl::Status ForEachPair(std::span<const std::byte* const> from,
                         std::span<std::byte* const> to, size_t page_bytes,
                         Fn fn) {
  for (size_t first = 0; first < from.size();) {
    size_t end = first + 1;
    while (end < from.size() && from[end] == from[end - 1] + page_bytes &&
           to[end] == to[end - 1] + page_bytes) {
      ++end;
    }
    PC_RETURN_IF_ERROR(fn(first, end - first));
    first = end;
  }
  return absl::OkStatus();
}

// A copy of ours: right once it is done.
class CopyArrival final : public Arrival {
 public:
  explicit CopyArrival(std::vector<gpu::LayerGroup> groups)
      : groups_(std::move(groups)) {}
  ~CopyArrival() override {
    if (!groups_.empty()) Wait(groups_.back());
  }

 private:
  static bool Wait(const gpu::LayerGroup& group) {
    const absl::Status done = group.done->Synchronize();
    if (!done.ok()) LOG(ERROR) << "states did not arrive: " << done;
    return done.ok();
  }
  bool WaitForLayers(uint32_t num_layers) override {
    for (const gpu::LayerGroup& group : groups_) {
      if (group.end_layer >= num_layers) return Wait(group);
    }
    return true;
  }
  bool WaitForVerified() override {
    return groups_.empty() || Wait(groups_.back());
  }

  const std::vector<gpu::LayerGroup> groups_;  // one after the other
};

}  // namespace

absl::StatusOr<std::unique_ptr<KvMemory>> KvMemory::Create(
    const Options& options) {
  std::unique_ptr<KvMemory> memory(new KvMemory(options));
  if (options.device != nullptr) {
    MutexLock lock(&memory->mu_);
    PC_ASSIGN_OR_RETURN(memory->stream_, options.device->NewStream());
    PC_ASSIGN_OR_RETURN(memory->arrival_stream_, options.device->NewStream());
  }
  return memory;
}

absl::Status KvMemory::Zero(std::span<std::byte* const> pages,
                            size_t page_bytes) {
  if (!on_gpu()) {
    for (std::byte* page : pages) std::memset(page, 0, page_bytes);
    return absl::OkStatus();
  }
  MutexLock lock(&mu_);
  PC_RETURN_IF_ERROR(
      ForEachStretch(pages, page_bytes, [&](size_t first, size_t count) {
        mu_.AssertHeld();
        return stream_->Zero(pages[first], count * page_bytes);
      }));
  return stream_->Synchronize();
}

absl::Status KvMemory::Zero(const Rows& rows) {
  if (!on_gpu()) {
    for (size_t row = 0; row < rows.height; ++row) {
      std::memset(rows.first + row * rows.pitch, 0, rows.width);
    }
    return absl::OkStatus();
  }
  MutexLock lock(&mu_);
  PC_RETURN_IF_ERROR(
      stream_->Zero(rows.first, rows.pitch, rows.width, rows.height));
  return stream_->Synchronize();
}

absl::StatusOr<std::vector<uint64_t>> KvMemory::Sums(
    std::span<const std::byte* const> pages, size_t page_bytes, bool on_host) {
  if (!on_gpu() || on_host) {
    std::vector<uint64_t> sums;
    sums.reserve(pages.size());
    for (const std::byte* page : pages) {
      sums.push_back(PageSum({page, page_bytes}));
    }
    return sums;
  }
  if (pages.empty()) return std::vector<uint64_t>();
  MutexLock lock(&mu_);
  return options_.sum_pages ? SumsByKernel(pages, page_bytes)
                            : SumsByCopy(pages, page_bytes);
}

absl::Status KvMemory::Reserve(size_t staging_bytes, size_t scratch_bytes) {
  if (staging_.num_bytes() < staging_bytes) {
    staging_.Reset();
    PC_ASSIGN_OR_RETURN(staging_,
                        options_.device->AllocatePinned(staging_bytes));
  }
  if (scratch_.num_bytes() < scratch_bytes) {
    scratch_.Reset();
    PC_ASSIGN_OR_RETURN(scratch_, options_.device->Allocate(scratch_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> KvMemory::SumsByKernel(
    std::span<const std::byte* const> pages, size_t page_bytes) {
  const size_t table_bytes = pages.size() * sizeof(pages[0]);
  const size_t sums_bytes = pages.size() * sizeof(uint64_t);
  // The table goes and the sums come through one pinned buffer.
  PC_RETURN_IF_ERROR(
      Reserve(table_bytes + sums_bytes, table_bytes + sums_bytes));
  std::byte* const staging = staging_.data();
  std::byte* const scratch = scratch_.data();
  std::memcpy(staging, static_cast<const void*>(pages.data()), table_bytes);
  PC_RETURN_IF_ERROR(options_.device->MakeCurrent());
  PC_RETURN_IF_ERROR(
      stream_->Copy(scratch, staging, table_bytes, gpu::CopyKind::kToDevice));
  PC_RETURN_IF_ERROR(options_.sum_pages(
      reinterpret_cast<const std::byte* const*>(scratch), pages.size(),
      page_bytes, reinterpret_cast<uint64_t*>(scratch + table_bytes),
      stream_.get()));
  PC_RETURN_IF_ERROR(stream_->Copy(staging + table_bytes, scratch + table_bytes,
                                   sums_bytes, gpu::CopyKind::kToHost));
  PC_RETURN_IF_ERROR(stream_->Synchronize());
  std::vector<uint64_t> sums(pages.size());
  std::memcpy(sums.data(), staging + table_bytes, sums_bytes);
  return sums;
}

absl::StatusOr<std::vector<uint64_t>> KvMemory::SumsByCopy(
    std::span<const std::byte* const> pages, size_t page_bytes) {
  const size_t at_once = std::max<size_t>(kStagingBytes / page_bytes, 1);
  PC_RETURN_IF_ERROR(Reserve(at_once * page_bytes, 0));
  std::vector<uint64_t> sums;
  sums.reserve(pages.size());
  for (size_t done = 0; done < pages.size(); done += at_once) {
    const size_t count = std::min(at_once, pages.size() - done);
    for (size_t i = 0; i < count; ++i) {
      PC_RETURN_IF_ERROR(stream_->Copy(staging_.data() + i * page_bytes,
                                       pages[done + i], page_bytes,
                                       gpu::CopyKind::kToHost));
    }
    PC_RETURN_IF_ERROR(stream_->Synchronize());
    for (size_t i = 0; i < count; ++i) {
      sums.push_back(PageSum({staging_.data() + i * page_bytes, page_bytes}));
    }
  }
  return sums;
}

absl::StatusOr<std::unique_ptr<Arrival>> KvMemory::StartCopyFromHost(
    std::span<const std::byte* const> from, std::span<std::byte* const> to,
    const KvLayout& layout) {
  CHECK_EQ(from.size(), to.size());
  std::vector<gpu::PageStretch> stretches;
  PC_RETURN_IF_ERROR(ForEachPair(
      from, to, layout.page_bytes(), [&](size_t first, size_t count) {
        stretches.push_back(
            {.to = to[first], .from = from[first], .num_pages = count});
        return absl::OkStatus();
      }));
  MutexLock lock(&mu_);
  absl::StatusOr<std::vector<gpu::LayerGroup>> groups =
      gpu::QueueLayeredCopy(*options_.device, *arrival_stream_, stretches,
                            layout.page_bytes(), layout.num_layers);
  if (!groups.ok()) {
    // Nothing may be on its way to pages that are given back.
    arrival_stream_->Synchronize().IgnoreError();  // the first error is told
    return groups.status();
  }
  return std::make_unique<CopyArrival>(*std::move(groups));
}

absl::Status KvMemory::Copy(std::span<const std::byte* const> from,
                            std::span<std::byte* const> to, size_t page_bytes) {
  CHECK_EQ(from.size(), to.size());
  if (!on_gpu()) {
    for (size_t i = 0; i < from.size(); ++i) {
      std::memcpy(to[i], from[i], page_bytes);
    }
    return absl::OkStatus();
  }
  MutexLock lock(&mu_);
  PC_RETURN_IF_ERROR(
      ForEachPair(from, to, page_bytes, [&](size_t first, size_t count) {
        mu_.AssertHeld();
        return stream_->Copy(to[first], from[first], count * page_bytes,
                             gpu::CopyKind::kOnDevice);
      }));
  return stream_->Synchronize();
}

}  // namespace promptcache::worker
