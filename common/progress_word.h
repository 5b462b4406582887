#pragma once

#include <cstdint>
#include <optional>

// How far a module is that is being copied to a GPU while others read it: one
// 64-bit word in memory that the daemon writes and workers map, behind the
// array of page generations. The low 48 bits of the module's generation stand
// above 16 bits of state, so that a word which serves another module by now is
// never taken for this one's (generations are not used twice).
namespace promptcache {

// States: the number of layers that can be read, or one of these.
inline constexpr uint64_t kProgressFailed = 0xFFFE;
inline constexpr uint64_t kProgressVerified = 0xFFFF;  // all, and sums right
inline constexpr uint64_t kMaxProgressLayers = 0xFFFD;

constexpr uint64_t ProgressWord(uint64_t generation, uint64_t state) {
  return generation << 16 | state;
}

// The state that `word` holds for a module of that generation; nullopt when it
// is another module's: this one's copy has ended, and the page generations tell
// how.
constexpr std::optional<uint64_t> ProgressState(uint64_t word,
                                                uint64_t generation) {
  if (word >> 16 != (generation << 16) >> 16) return std::nullopt;
  return word & 0xFFFF;
}

}  // namespace promptcache
