#include "common/utf8.h"

#include <cstdint>
#include <cstring>

namespace promptcache {
namespace {

uint8_t Byte(std::string_view text, size_t at) {
  return static_cast<uint8_t>(text[at]);
}

// Length of the run of ASCII that `text` begins with, by whole words.
size_t AsciiPrefix(std::string_view text) {
  size_t n = 0;
  for (; n + sizeof(uint64_t) <= text.size(); n += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, text.data() + n, sizeof(word));
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (n < text.size() && Byte(text, n) < 0x80) ++n;
  return n;
}

// Length of the valid UTF-8 that `text` begins with.
size_t ValidPrefix(std::string_view text) {
  size_t n = 0;
  while (true) {
    n += AsciiPrefix(text.substr(n));
    const Utf8Step step = NextUtf8(text.substr(n));
    if (!step.valid) return n;
    n += step.num_bytes;
  }
}

}  // namespace

Utf8Step NextUtf8(std::string_view text) {
  if (text.empty()) return {};
  const uint8_t lead = Byte(text, 0);
  if (lead < 0x80) return {.num_bytes = 1, .valid = true};
  const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                        : lead >= 0xE0 && lead <= 0xEF ? 3
                        : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                       : 0;
  if (length == 0) return {.num_bytes = 1};
  // The second byte's range shuts out overlong forms, surrogates and what is
  // above U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {.num_bytes = i, .incomplete = true};
    if (Byte(text, i) < low || Byte(text, i) > high) return {.num_bytes = i};
    low = 0x80;
    high = 0xBF;
  }
  return {.num_bytes = length, .valid = true};
}

bool IsValidUtf8(std::string_view text) {
  return ValidPrefix(text) == text.size();
}

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t valid = ValidPrefix(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    out.append(kReplacementCharacter);
    text.remove_prefix(NextUtf8(text).num_bytes);
  }
  return out;
}

char32_t CodePointOf(std::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 1) return first;
  char32_t code_point = first & (0xFFu >> (character.size() + 1));
  for (const char c : character.substr(1)) {
    code_point = code_point << 6 | (static_cast<uint8_t>(c) & 0x3Fu);
  }
  return code_point;
}

void AppendUtf8(char32_t code_point, std::string* out) {
  const auto tail = [&](int shift) {
    out->push_back(static_cast<char>(0x80 | (code_point >> shift & 0x3F)));
  };
  if (code_point < 0x80) {
    out->push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out->push_back(static_cast<char>(0xC0 | code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | code_point >> 12));
    tail(6);
    tail(0);
  } else {
    out->push_back(static_cast<char>(0xF0 | code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace promptcache
