#pragma once

#include <cstdint>
#include <span>
#include <utility>
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
  // What views of the same states agree in. Those that agree in it differ in
  // later pages at most, which pages of modules do not.
  struct Key {
    const std::byte* first_page = nullptr;
    uint32_t slot = 0;  // in it
    uint32_t num_tokens = 0;
    int32_t local_position = 0;

    friend bool operator==(const Key&, const Key&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Key& key) {
      return H::combine(std::move(h), key.first_page, key.slot, key.num_tokens,
                        key.local_position);
    }
  };
  void Look(const KvView& view, size_t index, uint32_t page_tokens);

  std::vector<uint32_t> ids_;
  std::vector<size_t> first_;
  // The first view of each kind; one that differs in later pages stays alone.
  absl::flat_hash_map<Key, Seen> seen_;
  uint32_t last_id_ = 0;
};

}  // namespace promptcache::worker
