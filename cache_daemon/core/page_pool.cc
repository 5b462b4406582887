#include "cache_daemon/core/page_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/page_sum.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

constexpr uint64_t kSystemPageBytes = 4096;

// Calls fn(segment, page) for every page of the runs, in order.
template <typename Fn>
void ForEachPage(const PageRuns& runs, Fn fn) {
  for (const PageRun& run : runs) {
    for (uint32_t i = 0; i < run.num_pages; ++i) {
      fn(run.segment, run.first_page + i);
    }
  }
}

absl::Status AddSegments(const char* name, uint64_t tier_bytes,
                         uint64_t segment_bytes,
                         std::vector<gpu::HostSegment>* out) {
  uint64_t left = tier_bytes - tier_bytes % kSystemPageBytes;
  while (left > 0) {
    const uint64_t bytes = std::min(left, segment_bytes);
    PC_ASSIGN_OR_RETURN(gpu::HostSegment segment,
                        gpu::HostSegment::Create(name, bytes));
    out->push_back(std::move(segment));
    left -= bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PagePool::Options::Validate() const {
  if (device_bytes < kSystemPageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("device tier: ", device_bytes, " bytes is too small"));
  }
  if (segment_bytes == 0 || segment_bytes % kSystemPageBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "segment_bytes ", segment_bytes, " is no multiple of 4096"));
  }
  if (min_page_bytes == 0 || min_page_bytes > segment_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_page_bytes ", min_page_bytes,
                     " is not between 1 and segment_bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(
    const Options& options) {
  PC_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<PagePool> pool(new PagePool());
  PC_RETURN_IF_ERROR(AddSegments("promptcache-device", options.device_bytes,
                                 options.segment_bytes, &pool->segments_));
  pool->num_device_segments_ = pool->num_segments();
  PC_RETURN_IF_ERROR(AddSegments("promptcache-host", options.host_bytes,
                                 options.segment_bytes, &pool->segments_));
  pool->generations_stride_ =
      static_cast<uint32_t>(options.segment_bytes / options.min_page_bytes);
  PC_ASSIGN_OR_RETURN(
      pool->generations_,
      gpu::HostSegment::Create(
          "promptcache-generations",
          sizeof(uint64_t) * pool->num_segments() * pool->generations_stride_));
  if (absl::Status s = pool->generations_.SealFutureWrites(); !s.ok()) {
    // Linux before 5.1: workers could write it, which only harms themselves.
    LOG(WARNING) << s;
  }
  LOG(INFO) << "page pool: device " << pool->tier_bytes(Tier::kDevice)
            << " bytes (" << pool->kind(Tier::kDevice) << "), host "
            << pool->tier_bytes(Tier::kHost) << " bytes, "
            << pool->num_segments() << " segments";
  return pool;
}

uint64_t PagePool::tier_bytes(Tier tier) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < num_segments(); ++i) {
    if (this->tier(i) == tier) bytes += segment_bytes(i);
  }
  return bytes;
}

std::string PagePool::kind(Tier tier) const {
  for (uint32_t i = 0; i < num_segments(); ++i) {
    if (this->tier(i) == tier) {
      return absl::StrCat("cpu ",
                          ToAbsl(gpu::HostPagesName(segments_[i].pages())));
    }
  }
  return "none";
}

uint32_t PagePool::PagesIn(uint32_t segment, uint64_t page_bytes) const {
  return static_cast<uint32_t>(std::min<uint64_t>(
      segment_bytes(segment) / page_bytes, generations_stride_));
}

uint64_t* PagePool::GenerationWord(uint32_t segment, uint32_t page) const {
  return reinterpret_cast<uint64_t*>(generations_.base()) +
         uint64_t{segment} * generations_stride_ + page;
}

void PagePool::Stamp(const PageRuns& runs, uint64_t generation) const {
  ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
    std::atomic_ref<uint64_t>(*GenerationWord(segment, page))
        .store(generation, std::memory_order_release);
  });
}

uint64_t PagePool::Generation(uint32_t segment, uint32_t page) const {
  return std::atomic_ref<uint64_t>(*GenerationWord(segment, page))
      .load(std::memory_order_acquire);
}

void PagePool::Zero(const PageRuns& runs, uint64_t page_bytes) const {
  ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
    const std::span<std::byte> bytes = Page(segment, page, page_bytes);
    std::memset(bytes.data(), 0, bytes.size());
  });
}

std::vector<uint64_t> PagePool::Sums(const PageRuns& runs,
                                     uint64_t page_bytes) const {
  std::vector<uint64_t> sums;
  ForEachPage(runs, [&](uint32_t segment, uint32_t page) {
    sums.push_back(PageSum(Page(segment, page, page_bytes)));
  });
  return sums;
}

std::vector<uint64_t> PagePool::Copy(const PageRuns& from, const PageRuns& to,
                                     uint64_t page_bytes) const {
  std::vector<std::span<std::byte>> targets;
  ForEachPage(to, [&](uint32_t segment, uint32_t page) {
    targets.push_back(Page(segment, page, page_bytes));
  });
  std::vector<uint64_t> sums;
  sums.reserve(targets.size());
  ForEachPage(from, [&](uint32_t segment, uint32_t page) {
    const std::span<std::byte> target = targets[sums.size()];
    std::memcpy(target.data(), Page(segment, page, page_bytes).data(),
                target.size());
    sums.push_back(PageSum(target));
  });
  return sums;
}

}  // namespace promptcache::daemon
