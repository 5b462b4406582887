#include "inference_worker/tokenizer/literal_tokens.h"

namespace promptcache::worker {

void LiteralTokens::Add(std::string_view text, int32_t id) {
  if (text.empty()) return;
  first_bytes_.set(static_cast<uint8_t>(text[0]));
  size_t node = 0;
  for (const char c : text) {
    const auto [it, added] =
        nodes_[node].children.try_emplace(c, nodes_.size());
    node = it->second;
    if (added) nodes_.emplace_back();
  }
  nodes_[node].id = id;
}

LiteralTokens::Match LiteralTokens::LongestAt(std::string_view text) const {
  Match longest;
  size_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto it = nodes_[node].children.find(text[i]);
    if (it == nodes_[node].children.end()) break;
    node = it->second;
    if (nodes_[node].id >= 0) longest = {i + 1, nodes_[node].id};
  }
  return longest;
}

void LiteralTokens::Split(
    std::string_view text,
    absl::FunctionRef<void(std::string_view, int32_t)> visit) const {
  size_t begin = 0;  // of what was not visited yet
  if (first_bytes_.any()) {
    for (size_t i = 0; i < text.size();) {
      const Match match = first_bytes_[static_cast<uint8_t>(text[i])]
                              ? LongestAt(text.substr(i))
                              : Match{};
      if (match.id < 0) {
        ++i;
        continue;
      }
      if (i > begin) visit(text.substr(begin, i - begin), -1);
      visit(text.substr(i, match.num_bytes), match.id);
      i += match.num_bytes;
      begin = i;
    }
  }
  if (begin < text.size()) visit(text.substr(begin), -1);
}

}  // namespace promptcache::worker
