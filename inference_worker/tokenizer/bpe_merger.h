#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

namespace promptcache::worker {

// Merges the bytes of one piece by rank: of all neighbours that a rule merges
// those of the lowest rank first, leftmost first. n log n in the piece's
// length. Immutable and thread-safe once filled.
class BpeMerger {
 public:
  BpeMerger() { byte_ids_.fill(-1); }

  // The token of a single byte. Bytes without one are left out.
  void SetByte(uint8_t byte, int32_t id) { byte_ids_[byte] = id; }
  void Reserve(size_t num_rules) { rules_.reserve(num_rules); }
  // Rules in order of rank; of equal ones the first counts.
  void AddRule(int32_t left, int32_t right, int32_t merged);

  // Appends the piece's ids.
  void Merge(std::string_view piece, std::vector<int32_t>* ids) const;

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
