#include "inference_worker/engine/shared_views.h"

#include <algorithm>

namespace promptcache::worker {
namespace {

// Of views that agree in their keys.
bool SamePages(const KvView& a, const KvView& b, uint32_t page_tokens) {
  const uint32_t slot = a.first_token % page_tokens;
  const uint32_t num_pages =
      (slot + a.num_tokens + page_tokens - 1) / page_tokens;
  const std::byte* const* const pages = a.pages + a.first_token / page_tokens;
  return std::equal(pages, pages + num_pages,
                    b.pages + b.first_token / page_tokens);
}

}  // namespace

void SharedViews::Find(std::span<const RowGroup> groups, uint32_t page_tokens) {
  ids_.clear();
  first_.assign(1, 0);
  seen_.clear();
  last_id_ = 0;
  for (const RowGroup& group : groups) {
    for (const KvView& view : group.visible) {
      ids_.push_back(0);
      if (view.num_tokens > 0) Look(view, ids_.size() - 1, page_tokens);
    }
    first_.push_back(ids_.size());
  }
}

void SharedViews::Look(const KvView& view, size_t index, uint32_t page_tokens) {
  const Key key = {.first_page = view.pages[view.first_token / page_tokens],
                   .slot = view.first_token % page_tokens,
                   .num_tokens = view.num_tokens,
                   .local_position = view.local_position};
  const auto [it, inserted] = seen_.try_emplace(key, Seen{&view, index});
  if (inserted || !SamePages(*it->second.view, view, page_tokens)) return;
  uint32_t& id = ids_[it->second.index];
  if (id == 0) id = ++last_id_;
  ids_[index] = id;
}

}  // namespace promptcache::worker
