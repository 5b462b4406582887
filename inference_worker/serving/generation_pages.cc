// The part of GenerationJob that takes pages.

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/byte_size.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/serving/generation_job.h"

namespace promptcache::worker {

uint64_t GenerationJob::AllModulePages() const {
  if (request.full_attention) return 0;
  const pml::Plan& plan = *request.prompt->plan;
  const auto needed = NeededModules(
      plan, std::vector<bool>(plan.modules.size(), false), request.warm);
  uint64_t total = 0;
  for (size_t i = 0; i < needed.size(); ++i) {
    if (!needed[i]) continue;
    total += execution_->module_pages(i) + execution_->temporary_pages(i);
  }
  return total;
}

absl::Status GenerationJob::CheckMost(uint64_t module_pages) const {
  const uint64_t most =
      (request.warm ? 0 : execution_->max_tail_pages()) + module_pages;
  if (most <= pages_->capacity_pages()) return absl::OkStatus();
  const auto bytes = [this](uint64_t pages) {
    return FormatByteSize(pages * pages_->page_stride_bytes());
  };
  std::string message = absl::StrCat("the request may need ", most,
                                     " private KV pages (", bytes(most), ")");
  if (module_pages > 0) {
    absl::StrAppend(&message, ", ", module_pages,
                    " of them for modules that it cannot read in the cache");
  }
  absl::StrAppend(&message, "; the worker has ", pages_->capacity_pages(), " (",
                  bytes(pages_->capacity_pages()),
                  "): shorten it or raise --tail_bytes");
  for (const std::string& notice : Notices()) {
    absl::StrAppend(&message, "; ", notice);
  }
  return absl::FailedPreconditionError(message);
}

absl::Status GenerationJob::CheckPages(bool cached) const {
  return CheckMost(cached ? 0 : AllModulePages());
}

uint64_t GenerationJob::TailPagesNow() const {
  return request.warm ? 0 : execution_->tail_pages(tokens_.generated().size());
}

bool GenerationJob::Admit(bool with_cache, uint64_t keep_free) {
  const uint64_t count =
      TailPagesNow() + (with_cache ? reserved_pages_ : AllModulePages());
  if (count + keep_free > pages_->free_pages()) return false;
  auto pages = pages_->Allocate(count);
  if (!pages.ok()) return false;
  held_pages_ = *std::move(pages);
  spare_pages_ = held_pages_;
  execution_->AddTail(TakePages(TailPagesNow()));
  return true;
}

absl::Status GenerationJob::GrowTail() {
  const uint64_t missing = execution_->missing_tail_pages();
  if (missing == 0) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const std::vector<std::byte*> pages,
                      pages_->Allocate(missing));
  held_pages_.insert(held_pages_.end(), pages.begin(), pages.end());
  execution_->AddTail(pages);
  return absl::OkStatus();
}

std::vector<std::byte*> GenerationJob::TakePages(uint64_t count) {
  CHECK_LE(count, spare_pages_.size());
  const auto first = spare_pages_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<std::byte*> taken(first, spare_pages_.end());
  spare_pages_.erase(first, spare_pages_.end());
  return taken;
}

void GenerationJob::GiveBackSpare(uint64_t kept) {
  if (spare_pages_.size() <= kept) return;
  std::vector<std::byte*> rest = TakePages(spare_pages_.size() - kept);
  std::sort(rest.begin(), rest.end());
  std::erase_if(held_pages_, [&rest](std::byte* page) {
    return std::binary_search(rest.begin(), rest.end(), page);
  });
  pages_->Free(rest);
}

uint64_t GenerationJob::ModulePagesNow() const {
  if (request.full_attention) return 0;
  uint64_t count = 0;
  for (size_t i = 0; i < modules.sources.size(); ++i) {
    if (encoded_[i]) continue;
    switch (modules.sources[i]) {
      case ModuleSource::kUnused:
      case ModuleSource::kPending:
        break;
      case ModuleSource::kRead:
        if (ReadsCopy(i)) count += execution_->module_pages(i);
        break;
      case ModuleSource::kPrivate:
        count += execution_->module_pages(i);
        [[fallthrough]];
      case ModuleSource::kCreate:
        count += execution_->temporary_pages(i);
    }
  }
  return count;
}

absl::Status GenerationJob::TakeModulePages() {
  const uint64_t needed = ModulePagesNow();
  const uint64_t lent_tail = TailPagesNow() - execution_->num_tail_pages();
  // By modules of earlier stages.
  const uint64_t used =
      held_pages_.size() - spare_pages_.size() - execution_->num_tail_pages();
  uint64_t reserved = used + needed;
  // What is pending may become this request's own to encode, or to read in a
  // copy, as it did when these pages were lacking. Would they go back now, the
  // one who let go of it for want of them would take them, and be told that it
  // is pending here: two could pass pages and reservation on for ever.
  if (modules.HasPending()) reserved = std::max(reserved, reserved_pages_);
  reserved_pages_ = reserved;
  GiveBackSpare(reserved - used);
  const uint64_t wanted = needed + lent_tail;
  if (spare_pages_.size() < wanted) {
    PC_RETURN_IF_ERROR(CheckMost(reserved_pages_));
    PC_ASSIGN_OR_RETURN(const std::vector<std::byte*> more,
                        pages_->Allocate(wanted - spare_pages_.size()));
    held_pages_.insert(held_pages_.end(), more.begin(), more.end());
    spare_pages_.insert(spare_pages_.end(), more.begin(), more.end());
  }
  execution_->AddTail(TakePages(lent_tail));
  lent_pages_ = 0;
  return absl::OkStatus();
}

void GenerationJob::LendPages() {
  const std::vector<std::byte*> tail = execution_->TakeTail();
  spare_pages_.insert(spare_pages_.end(), tail.begin(), tail.end());
  lent_pages_ = spare_pages_.size();
  GiveBackSpare(0);
}

bool GenerationJob::ReadsCopy(size_t module) const {
  return modules.lease->modules()[module].on_host && pages_->memory()->on_gpu();
}

}  // namespace promptcache::worker
