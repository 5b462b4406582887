#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace promptcache {

// U+FFFD, which stands for what is not UTF-8.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

struct Utf8Step {
  // Of the character, or of the maximal invalid part; 0 at the end of text.
  size_t num_bytes = 0;
  bool valid = false;
  // Not valid only because the text ends here: more bytes may complete it.
  bool incomplete = false;
};

// What `text` begins with. Invalid parts are maximal as in the WHATWG's
// decoder (and Python's errors="replace"): the longest beginning of a
// character, or one byte.
Utf8Step NextUtf8(std::string_view text);

bool IsValidUtf8(std::string_view text);

// Each maximal invalid part becomes one U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

// Of one whole character. REQUIRES: valid UTF-8.
char32_t CodePointOf(std::string_view character);
// REQUIRES: a code point that is a character.
void AppendUtf8(char32_t code_point, std::string* out);

}  // namespace promptcache
