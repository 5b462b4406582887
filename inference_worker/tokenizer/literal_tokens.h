#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"

namespace promptcache::worker {

// Tokens that are taken whole wherever they occur in a text, before anything
// else: leftmost first, of those that begin at one place the longest.
// Immutable and thread-safe once filled.
class LiteralTokens {
 public:
  void Add(std::string_view text, int32_t id);

  // In order: each token found with its id, what lies between with -1.
  void Split(std::string_view text,
             absl::FunctionRef<void(std::string_view, int32_t)> visit) const;

 private:
  struct Node {
    int32_t id = -1;
    std::map<char, size_t> children;
  };
  struct Match {
    size_t num_bytes = 0;
    int32_t id = -1;
  };

  // The longest token that `text` begins with.
  Match LongestAt(std::string_view text) const;

  std::vector<Node> nodes_ = {Node{}};
  std::bitset<256> first_bytes_;
};

}  // namespace promptcache::worker
