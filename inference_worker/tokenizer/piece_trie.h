#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace promptcache::worker {

// Which of many pieces a text begins with. Immutable and thread-safe.
class PieceTrie {
 public:
  PieceTrie() = default;
  // Spelling and id; of equal spellings the lowest id counts. None is empty.
  explicit PieceTrie(std::vector<std::pair<std::string_view, int32_t>> pieces);

  // Calls visit(num_bytes, id) for each piece that `text` begins with, the
  // shortest first.
  template <typename Visit>
  void VisitPrefixes(std::string_view text, Visit visit) const {
    if (text.empty() || nodes_.empty()) return;
    uint32_t node = roots_[static_cast<uint8_t>(text[0])];
    for (size_t i = 1; node != kNone; ++i) {
      if (nodes_[node].id >= 0) visit(i, nodes_[node].id);
      if (i == text.size()) return;
      node = Child(nodes_[node], static_cast<uint8_t>(text[i]));
    }
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // Children lie next to each other, ordered by their bytes.
  struct Node {
    uint32_t first_child = 0;
    uint16_t num_children = 0;
    uint8_t byte = 0;
    int32_t id = -1;
  };

  uint32_t Child(const Node& node, uint8_t byte) const;

  std::vector<Node> nodes_;
  std::array<uint32_t, 256> roots_ = {};
};

}  // namespace promptcache::worker
