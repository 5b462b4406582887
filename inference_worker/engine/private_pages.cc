#include "inference_worker/engine/private_pages.h"

#include <glog/logging.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

constexpr size_t kCacheLineBytes = 64;

size_t PageStrideBytes(const KvLayout& layout) {
  return (layout.page_bytes() + kCacheLineBytes - 1) / kCacheLineBytes *
         kCacheLineBytes;
}

// Faults cost 12-14 us each where this was measured; this is one call for all.
// What is present already stays as it is.
absl::Status Populate(std::byte* base, size_t num_bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(base, num_bytes, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) {
    return absl::ResourceExhaustedError(
        absl::StrCat("private KV pages: cannot populate ", num_bytes,
                     " bytes: ", std::strerror(errno)));
  }
#endif
  // A kernel before 5.14: pages come one fault at a time when they are zeroed.
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrivatePages>> PrivatePages::Create(
    const KvLayout& layout, uint64_t capacity_bytes, KvMemory* memory) {
  if (absl::Status s = layout.Validate(); !s.ok()) return s;
  const size_t stride = PageStrideBytes(layout);
  const uint64_t num_pages = capacity_bytes / stride;
  if (num_pages == 0 || num_pages > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "private KV pages: capacity of ", capacity_bytes, " bytes is ",
        num_pages, " pages of ", stride, " bytes, must be 1 to 4294967295"));
  }
  auto pages = absl::WrapUnique(new PrivatePages(layout, num_pages));
  pages->memory_ = memory;
  if (memory == nullptr) {
    PC_ASSIGN_OR_RETURN(pages->cpu_, KvMemory::Create({}));
    pages->memory_ = pages->cpu_.get();
  }
  PC_RETURN_IF_ERROR(pages->TakeMemory());
  MutexLock lock(&pages->mu_);
  pages->free_.reserve(num_pages);
  // The last is handed out first: lowest addresses first.
  for (uint64_t i = num_pages; i > 0; --i) {
    pages->free_.push_back(static_cast<uint32_t>(i - 1));
  }
  return pages;
}

absl::Status PrivatePages::TakeMemory() {
  if (memory_->on_gpu()) {
    PC_ASSIGN_OR_RETURN(buffer_, memory_->device()->Allocate(num_bytes()));
    base_ = buffer_.data();
    MutexLock lock(&mu_);
    held_bytes_ = num_bytes();
    return absl::OkStatus();
  }
  void* base = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("private KV pages: cannot map ", num_bytes(),
                     " bytes: ", std::strerror(errno)));
  }
  base_ = static_cast<std::byte*>(base);
  // Advice only: fewer TLB misses where the kernel grants it.
  (void)madvise(base_, num_bytes(), MADV_HUGEPAGE);
  return absl::OkStatus();
}

absl::Status PrivatePages::Grow(size_t used_bytes) {
  size_t held = 0;
  {
    MutexLock lock(&mu_);
    held = held_bytes_;
  }
  if (used_bytes <= held) return absl::OkStatus();
  const size_t wanted =
      std::min((used_bytes + kGrowthBytes - 1) / kGrowthBytes * kGrowthBytes,
               num_bytes());
  // Without the lock: two who grow at a time populate a part twice, which does
  // nothing to it.
  PC_RETURN_IF_ERROR(Populate(base_ + held, wanted - held));
  MutexLock lock(&mu_);
  held_bytes_ = std::max(held_bytes_, wanted);
  return absl::OkStatus();
}

PrivatePages::PrivatePages(const KvLayout& layout, uint64_t capacity_pages)
    : layout_(layout),
      page_stride_bytes_(PageStrideBytes(layout)),
      capacity_pages_(capacity_pages) {}

PrivatePages::~PrivatePages() {
  if (base_ == nullptr) return;
  {
    MutexLock lock(&mu_);
    if (free_.size() != capacity_pages_) {
      LOG(ERROR) << "private KV pages: " << capacity_pages_ - free_.size()
                 << " of " << capacity_pages_ << " pages were not freed";
    }
  }
  if (!memory_->on_gpu()) munmap(base_, num_bytes());
}

absl::StatusOr<std::vector<std::byte*>> PrivatePages::Allocate(
    uint64_t num_pages) {
  std::vector<std::byte*> pages;
  size_t used_bytes = 0;  // up to the end of the highest of the pages
  {
    MutexLock lock(&mu_);
    if (num_pages > free_.size()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("private KV pages: ", num_pages, " asked for, ",
                       free_.size(), " of ", capacity_pages_, " are free"));
    }
    pages.reserve(num_pages);
    for (uint64_t i = 0; i < num_pages; ++i) {
      const size_t offset = free_.back() * page_stride_bytes_;
      used_bytes = std::max(used_bytes, offset + page_stride_bytes_);
      pages.push_back(base_ + offset);
      free_.pop_back();
    }
    peak_pages_ = std::max(peak_pages_, capacity_pages_ - free_.size());
  }
  absl::Status status = Grow(used_bytes);
  // Nothing of an earlier request is ever seen by a later one.
  if (status.ok()) status = memory_->Zero(pages, layout_.page_bytes());
  if (!status.ok()) {
    Free(pages);
    return status;
  }
  return pages;
}

void PrivatePages::Free(const std::vector<std::byte*>& pages) {
  MutexLock lock(&mu_);
  CHECK_LE(free_.size() + pages.size(), capacity_pages_) << "freed twice";
  // Backwards, so that the next Allocate gives the same order again.
  for (size_t i = pages.size(); i > 0; --i) {
    const auto offset = static_cast<uint64_t>(pages[i - 1] - base_);
    CHECK(pages[i - 1] >= base_ && offset % page_stride_bytes_ == 0 &&
          offset / page_stride_bytes_ < capacity_pages_)
        << "not a page of this pool";
    free_.push_back(static_cast<uint32_t>(offset / page_stride_bytes_));
  }
}

uint64_t PrivatePages::free_pages() const {
  MutexLock lock(&mu_);
  return free_.size();
}

uint64_t PrivatePages::peak_pages() const {
  MutexLock lock(&mu_);
  return peak_pages_;
}

}  // namespace promptcache::worker
