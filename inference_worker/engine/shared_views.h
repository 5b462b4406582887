#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "inference_worker/engine/backend.h"

namespace promptcache::worker {

// Which views of a pass's groups are the same states: the same tokens in the
// same pages, wherever each group has them stand. Requests that import one
// module have page tables of their own, with the same addresses in them.
// Thread-compatible; kept between passes for its memory.
class SharedViews {
 public:
  // Views point into the groups': these must outlive the use of ids().
  void Find(std::span<const RowGroup> groups, uint32_t page_tokens);

  // Parallel to groups[group].visible: one number for one set of states, 0 for
  // what no other group sees.
  std::span<const uint32_t> ids(size_t group) const {
    return std::span(ids_).subspan(first_[group],
                                   first_[group + 1] - first_[group]);
  }

 private:
  struct Seen {
    const KvView* view = nullptr;
    size_t index = 0;  // into ids_
  };
  void Look(const KvView& view, size_t index, uint32_t page_tokens);

  std::vector<uint32_t> ids_;
  std::vector<size_t> first_;
  // By the first page; a view that differs from the one here stays alone.
  absl::flat_hash_map<const std::byte*, Seen> seen_;
  uint32_t last_id_ = 0;
};

}  // namespace promptcache::worker
