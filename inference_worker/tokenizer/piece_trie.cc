#include "inference_worker/tokenizer/piece_trie.h"

#include <algorithm>

namespace promptcache::worker {

PieceTrie::PieceTrie(std::vector<std::pair<std::string_view, int32_t>> pieces) {
  std::sort(pieces.begin(), pieces.end());
  // Ranges of pieces that share their first bytes, level by level.
  struct Range {
    size_t begin, end, depth;
    uint32_t node;  // kNone: the root
  };
  roots_.fill(kNone);
  std::vector<Range> level = {{0, pieces.size(), 0, kNone}};
  while (!level.empty()) {
    std::vector<Range> next;
    for (const Range& range : level) {
      const auto first_child = static_cast<uint32_t>(nodes_.size());
      for (size_t i = range.begin; i < range.end;) {
        if (pieces[i].first.size() == range.depth) {
          int32_t& id = nodes_[range.node].id;
          if (id < 0) id = pieces[i].second;
          ++i;
          continue;
        }
        const char byte = pieces[i].first[range.depth];
        size_t end = i;
        while (end < range.end && pieces[end].first[range.depth] == byte) {
          ++end;
        }
        const auto node = static_cast<uint32_t>(nodes_.size());
        nodes_.push_back({.byte = static_cast<uint8_t>(byte)});
        if (range.node == kNone) roots_[static_cast<uint8_t>(byte)] = node;
        next.push_back({i, end, range.depth + 1, node});
        i = end;
      }
      if (range.node == kNone) continue;
      nodes_[range.node].first_child = first_child;
      nodes_[range.node].num_children =
          static_cast<uint16_t>(nodes_.size() - first_child);
    }
    level = std::move(next);
  }
}

uint32_t PieceTrie::Child(const Node& node, uint8_t byte) const {
  const auto first = nodes_.begin() + node.first_child;
  const auto last = first + node.num_children;
  const auto found = std::lower_bound(
      first, last, byte,
      [](const Node& child, uint8_t b) { return child.byte < b; });
  if (found == last || found->byte != byte) return kNone;
  return static_cast<uint32_t>(found - nodes_.begin());
}

}  // namespace promptcache::worker
