#include "inference_worker/tokenizer/bpe_merger.h"

#include <algorithm>
#include <queue>

namespace promptcache::worker {
namespace {

// Up to here looking at all neighbours again after each merge is faster than
// a heap.
constexpr size_t kMaxShort = 32;

constexpr int32_t kNone = -1;

// A symbol of a long piece, in a list by position.
struct Symbol {
  int32_t id;  // kNone: merged into the one before
  int32_t previous;
  int32_t next;
};

// Two neighbours that a rule merges, as they were when it was found.
struct Candidate {
  int32_t rank;
  int32_t position;  // of the left one
  int32_t left;
  int32_t right;
  int32_t merged;

  // For a heap whose top is the least.
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  }
};

}  // namespace

const BpeMerger::Rule* BpeMerger::Find(int32_t left, int32_t right) const {
  const auto it = rules_.find(PairOf(left, right));
  return it == rules_.end() ? nullptr : &it->second;
}

void BpeMerger::Merge(std::string_view piece, std::vector<int32_t>* ids) const {
  std::vector<int32_t> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id != kNone) symbols.push_back(id);
  }
  Merge(symbols, ids);
}

void BpeMerger::Merge(std::span<int32_t> symbols,
                      std::vector<int32_t>* ids) const {
  if (symbols.size() <= kMaxShort) {
    MergeShort(symbols, ids);
  } else {
    MergeLong(symbols, ids);
  }
}

void BpeMerger::MergeShort(std::span<int32_t> symbols,
                           std::vector<int32_t>* ids) const {
  // rules[i] merges symbols i and i + 1, or is null.
  std::array<const Rule*, kMaxShort> rules = {};
  size_t count = symbols.size();
  for (size_t i = 0; i + 1 < count; ++i) {
    rules[i] = Find(symbols[i], symbols[i + 1]);
  }
  while (count > 1) {
    size_t best = count;
    int32_t best_rank = 0;
    for (size_t i = 0; i + 1 < count; ++i) {
      if (rules[i] != nullptr &&
          (best == count || rules[i]->rank < best_rank)) {
        best = i;
        best_rank = rules[i]->rank;
      }
    }
    if (best == count) break;
    symbols[best] = rules[best]->merged;
    for (size_t i = best + 1; i + 1 < count; ++i) {
      symbols[i] = symbols[i + 1];
      rules[i] = rules[i + 1];
    }
    --count;
    if (best > 0) rules[best - 1] = Find(symbols[best - 1], symbols[best]);
    if (best + 1 < count) rules[best] = Find(symbols[best], symbols[best + 1]);
  }
  ids->insert(ids->end(), symbols.begin(),
              symbols.begin() + static_cast<std::ptrdiff_t>(count));
}

void BpeMerger::MergeLong(std::span<const int32_t> ids_before,
                          std::vector<int32_t>* ids) const {
  const auto count = static_cast<int32_t>(ids_before.size());
  std::vector<Symbol> symbols(ids_before.size());
  for (int32_t i = 0; i < count; ++i) {
    symbols[static_cast<size_t>(i)] = {.id = ids_before[static_cast<size_t>(i)],
                                       .previous = i - 1,
                                       .next = i + 1 < count ? i + 1 : kNone};
  }
  const auto at = [&symbols](int32_t i) -> Symbol& {
    return symbols[static_cast<size_t>(i)];
  };
  const auto candidate_at = [&](int32_t i, Candidate* out) {
    if (i == kNone || at(i).next == kNone) return false;
    const int32_t left = at(i).id;
    const int32_t right = at(at(i).next).id;
    const Rule* rule = Find(left, right);
    if (rule == nullptr) return false;
    *out = {rule->rank, i, left, right, rule->merged};
    return true;
  };

  std::vector<Candidate> found;
  Candidate candidate;
  for (int32_t i = 0; i < count; ++i) {
    if (candidate_at(i, &candidate)) found.push_back(candidate);
  }
  std::priority_queue<Candidate> queue({}, std::move(found));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = at(top.position);
    if (left.id != top.left || left.next == kNone ||
        at(left.next).id != top.right) {
      continue;  // one of the two has been merged meanwhile
    }
    Symbol& right = at(left.next);
    left.id = top.merged;
    left.next = right.next;
    right.id = kNone;
    if (left.next != kNone) at(left.next).previous = top.position;
    if (candidate_at(left.previous, &candidate)) queue.push(candidate);
    if (candidate_at(top.position, &candidate)) queue.push(candidate);
  }
  for (int32_t i = 0; i != kNone; i = at(i).next) ids->push_back(at(i).id);
}

}  // namespace promptcache::worker
