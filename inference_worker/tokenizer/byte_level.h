#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace promptcache::worker {

// Byte-level vocabularies spell each byte as one printable character: those of
// Latin-1 as they are, the 68 others as U+0100 and up, in order.
class ByteLevelSpelling {
 public:
  ByteLevelSpelling();

  const std::string& Spell(uint8_t byte) const { return spellings_[byte]; }
  // The bytes that `spelled` stands for; empty when it holds a character that
  // spells none.
  std::optional<std::string> Bytes(std::string_view spelled) const;

 private:
  static constexpr size_t kCodePoints = 256 + 68;

  std::array<std::string, 256> spellings_;
  std::array<int16_t, kCodePoints> bytes_;  // by code point; -1: none
};

}  // namespace promptcache::worker
