#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace promptcache::worker {

// Merges the symbols of one piece, in the beginning bytes or characters, by
// rank: of all neighbours that a rule merges those of the lowest rank first,
// leftmost first. n log n in the piece's length. Immutable and thread-safe once
// filled.
class BpeMerger {
 public:
  BpeMerger() { byte_ids_.fill(-1); }

  // The token of a single byte. Bytes without one are left out.
  void SetByte(uint8_t byte, int32_t id) { byte_ids_[byte] = id; }
  void Reserve(size_t num_rules) { rules_.reserve(num_rules); }
  // Lowest rank first; of two rules for the same pair the first counts.
  void AddRule(int32_t left, int32_t right, int32_t rank, int32_t merged) {
    rules_.try_emplace(PairOf(left, right), Rule{rank, merged});
  }

  // Appends the ids of the piece's bytes, merged.
  void Merge(std::string_view piece, std::vector<int32_t>* ids) const;
  // Appends `symbols`, merged; changes them. Any number but -1 is a symbol.
  void Merge(std::span<int32_t> symbols, std::vector<int32_t>* ids) const;

 private:
  struct Rule {
    int32_t rank;
    int32_t merged;
  };

  static uint64_t PairOf(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 |
           static_cast<uint32_t>(right);
  }
  const Rule* Find(int32_t left, int32_t right) const;
  void MergeShort(std::span<int32_t> symbols, std::vector<int32_t>* ids) const;
  void MergeLong(std::span<const int32_t> symbols,
                 std::vector<int32_t>* ids) const;

  std::array<int32_t, 256> byte_ids_;
  absl::flat_hash_map<uint64_t, Rule> rules_;
};

}  // namespace promptcache::worker
