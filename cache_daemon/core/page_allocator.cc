#include "cache_daemon/core/page_allocator.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// A page whose bytes come from more than one domain, or from nobody knows.
constexpr uint64_t kMixedDomain = 1;

}  // namespace

PageAllocator::PageAllocator(const PagePool* pool, Tier tier, uint32_t device)
    : pool_(pool) {
  const auto in_tier = [&](uint32_t segment) {
    return pool->tier(segment) == tier && pool->device(segment) == device;
  };
  while (first_segment_ < pool->num_segments() && !in_tier(first_segment_)) {
    ++first_segment_;
  }
  for (uint32_t i = first_segment_; i < pool->num_segments() && in_tier(i);
       ++i) {
    segments_.push_back({.bytes = pool->segment_bytes(i)});
    capacity_bytes_ += pool->segment_bytes(i);
    empty_.insert(i);
  }
}

std::optional<PageAllocator::Allocation> PageAllocator::Allocate(
    uint64_t num_pages, uint64_t page_bytes, uint64_t domain,
    PageOwner* owner) {
  CHECK_GT(num_pages, 0u);
  if (FreePages(page_bytes) < num_pages) return std::nullopt;
  Allocation out;
  uint64_t left = num_pages;
  while (left > 0) {
    const auto carving = carvings_.find(page_bytes);
    const bool any =
        carving != carvings_.end() && !carving->second.by_length.empty();
    Range best{};
    if (any) {
      const auto& ranges = carving->second.by_length;
      const auto fit = ranges.lower_bound(
          {static_cast<uint32_t>(std::min<uint64_t>(left, UINT32_MAX)), 0, 0});
      best = fit != ranges.end() ? *fit : *ranges.rbegin();
    }
    if (!any || std::get<0>(best) < left) {
      const std::optional<uint32_t> empty = BestEmpty(page_bytes);
      if (empty.has_value() &&
          (!any || pool_->PagesIn(*empty, page_bytes) > std::get<0>(best))) {
        Carve(*empty, page_bytes);
        continue;
      }
    }
    const PageRun run = Take(best, left);
    Own(run, domain, owner, &out.must_zero);
    out.runs.push_back(run);
    left -= run.num_pages;
  }
  used_bytes_ += num_pages * page_bytes;
  return out;
}

void PageAllocator::Free(const PageRuns& runs) {
  for (const PageRun& run : runs) FreeRun(run);
}

uint64_t PageAllocator::FreePages(uint64_t page_bytes) const {
  uint64_t pages = 0;
  const auto carving = carvings_.find(page_bytes);
  if (carving != carvings_.end()) pages = carving->second.free_pages;
  for (uint32_t segment : empty_) pages += pool_->PagesIn(segment, page_bytes);
  return pages;
}

uint64_t PageAllocator::TotalPages(uint64_t page_bytes) const {
  uint64_t pages = 0;
  for (uint32_t i = 0; i < num_segments(); ++i) {
    pages += pool_->PagesIn(first_segment_ + i, page_bytes);
  }
  return pages;
}

uint64_t PageAllocator::LargestFreeRunBytes() const {
  uint64_t largest = 0;
  for (uint32_t segment : empty_)
    largest = std::max(largest, At(segment).bytes);
  for (const auto& [page_bytes, carving] : carvings_) {
    if (carving.by_length.empty()) continue;
    largest = std::max(largest,
                       std::get<0>(*carving.by_length.rbegin()) * page_bytes);
  }
  return largest;
}

uint64_t PageAllocator::page_bytes(uint32_t segment) const {
  return At(segment).page_bytes;
}

std::vector<PageOwner*> PageAllocator::Owners(uint32_t segment) const {
  std::vector<PageOwner*> owners;
  if (At(segment).page_bytes == 0) return owners;
  for (const PageInfo& page : At(segment).pages) {
    if (page.owner != nullptr) owners.push_back(page.owner);
  }
  return owners;
}

std::optional<uint32_t> PageAllocator::BestEmpty(uint64_t page_bytes) const {
  std::optional<uint32_t> best;
  uint32_t best_pages = 0;
  for (uint32_t segment : empty_) {
    const uint32_t pages = pool_->PagesIn(segment, page_bytes);
    if (pages > best_pages) {
      best = segment;
      best_pages = pages;
    }
  }
  return best;
}

void PageAllocator::Carve(uint32_t segment, uint64_t page_bytes) {
  Segment& s = At(segment);
  const uint32_t num_pages = pool_->PagesIn(segment, page_bytes);
  if (s.carved_page_bytes != page_bytes) {
    // Pages of another size lie across the old ones.
    uint64_t domain = 0;
    for (const PageInfo& page : s.pages) {
      if (page.domain == 0) continue;
      domain =
          domain == 0 || domain == page.domain ? page.domain : kMixedDomain;
      if (domain == kMixedDomain) break;
    }
    s.pages.assign(num_pages, PageInfo{.domain = domain});
    s.carved_page_bytes = page_bytes;
  }
  s.page_bytes = page_bytes;
  empty_.erase(segment);
  ++carvings_[page_bytes].num_segments;
  AddRange(segment, 0, num_pages);
}

void PageAllocator::AddRange(uint32_t segment, uint32_t first,
                             uint32_t num_pages) {
  Segment& s = At(segment);
  s.free.emplace(first, num_pages);
  Carving& carving = carvings_[s.page_bytes];
  carving.by_length.insert({num_pages, segment, first});
  carving.free_pages += num_pages;
}

void PageAllocator::RemoveRange(uint32_t segment, uint32_t first,
                                uint32_t num_pages) {
  Segment& s = At(segment);
  s.free.erase(first);
  Carving& carving = carvings_[s.page_bytes];
  carving.by_length.erase({num_pages, segment, first});
  carving.free_pages -= num_pages;
}

PageRun PageAllocator::Take(const Range& range, uint64_t num_pages) {
  const auto [length, segment, first] = range;
  const uint32_t taken =
      static_cast<uint32_t>(std::min<uint64_t>(length, num_pages));
  RemoveRange(segment, first, length);
  if (taken < length) AddRange(segment, first + taken, length - taken);
  return {segment, first, taken};
}

void PageAllocator::ForgetDomain(const PageRuns& runs) {
  for (const PageRun& run : runs) {
    Segment& s = At(run.segment);
    for (uint32_t i = run.first_page; i < run.first_page + run.num_pages; ++i) {
      s.pages[i].domain = kMixedDomain;
    }
  }
}

void PageAllocator::Own(const PageRun& run, uint64_t domain, PageOwner* owner,
                        PageRuns* must_zero) {
  Segment& s = At(run.segment);
  s.used_pages += run.num_pages;
  for (uint32_t i = run.first_page; i < run.first_page + run.num_pages; ++i) {
    PageInfo& page = s.pages[i];
    CHECK(page.owner == nullptr);
    page.owner = owner;
    if (page.domain != 0 && page.domain != domain) {
      PageRun* last = must_zero->empty() ? nullptr : &must_zero->back();
      if (last != nullptr && last->segment == run.segment &&
          last->first_page + last->num_pages == i) {
        ++last->num_pages;
      } else {
        must_zero->push_back({run.segment, i, 1});
      }
    }
    page.domain = domain;
  }
}

void PageAllocator::FreeRun(const PageRun& run) {
  Segment& s = At(run.segment);
  uint32_t first = run.first_page;
  uint32_t length = run.num_pages;
  for (uint32_t i = first; i < first + length; ++i) {
    CHECK(s.pages[i].owner != nullptr);
    s.pages[i].owner = nullptr;
  }
  used_bytes_ -= length * s.page_bytes;
  s.used_pages -= length;

  auto next = s.free.lower_bound(first);
  if (next != s.free.begin()) {
    const auto [before, before_length] = *std::prev(next);
    if (before + before_length == first) {
      RemoveRange(run.segment, before, before_length);
      first = before;
      length += before_length;
      next = s.free.lower_bound(first);
    }
  }
  if (next != s.free.end() && next->first == first + length) {
    const auto [after, after_length] = *next;
    RemoveRange(run.segment, after, after_length);
    length += after_length;
  }
  AddRange(run.segment, first, length);
  ReleaseIfEmpty(run.segment);
}

void PageAllocator::ReleaseIfEmpty(uint32_t segment) {
  Segment& s = At(segment);
  if (s.used_pages > 0) return;
  RemoveRange(segment, 0, static_cast<uint32_t>(s.pages.size()));
  const auto carving = carvings_.find(s.page_bytes);
  if (--carving->second.num_segments == 0) carvings_.erase(carving);
  s.page_bytes = 0;
  empty_.insert(segment);
}

absl::Status PageAllocator::CheckInvariants() const {
  uint64_t used_bytes = 0;
  std::map<uint64_t, uint64_t> free_pages;
  for (uint32_t i = 0; i < num_segments(); ++i) {
    const uint32_t id = first_segment_ + i;
    const Segment& s = segments_[i];
    const auto fail = [&](const char* what) {
      return absl::InternalError(absl::StrCat("segment ", id, ": ", what));
    };
    if ((s.page_bytes == 0) != (empty_.count(id) > 0)) return fail("empty set");
    if (s.page_bytes == 0) {
      if (s.used_pages != 0 || !s.free.empty()) return fail("empty yet used");
      continue;
    }
    if (s.used_pages == 0) return fail("unused yet carved");
    std::vector<bool> is_free(s.pages.size());
    uint32_t end = UINT32_MAX;
    for (const auto& [first, length] : s.free) {
      if (first == end) return fail("neighbouring free ranges");
      end = first + length;
      if (end > s.pages.size()) return fail("free range beyond the end");
      const auto carving = carvings_.find(s.page_bytes);
      if (carving == carvings_.end() ||
          !carving->second.by_length.contains({length, id, first})) {
        return fail("free range is not indexed");
      }
      for (uint32_t p = first; p < end; ++p) is_free[p] = true;
      free_pages[s.page_bytes] += length;
    }
    uint32_t used = 0;
    for (size_t p = 0; p < s.pages.size(); ++p) {
      if (is_free[p] == (s.pages[p].owner != nullptr)) {
        return fail("a page is both free and owned, or neither");
      }
      used += s.pages[p].owner != nullptr ? 1 : 0;
    }
    if (used != s.used_pages) return fail("used pages");
    used_bytes += used * s.page_bytes;
  }
  if (used_bytes != used_bytes_) return absl::InternalError("used bytes");
  if (used_bytes > capacity_bytes_) return absl::InternalError("budget");
  for (const auto& [page_bytes, carving] : carvings_) {
    if (carving.free_pages != free_pages[page_bytes]) {
      return absl::InternalError("free pages");
    }
  }
  return absl::OkStatus();
}

}  // namespace promptcache::daemon
