#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache::worker {

// SentencePiece's `precompiled_charsmap`: which pieces of text become which
// others (NFKC and the like, as tables). A double array of keys in UTF-8, then
// what they become. Immutable and thread-safe.
class Charsmap {
 public:
  struct Step {
    size_t num_bytes = 0;  // 0: nothing is replaced here
    std::string_view replacement;
  };

  // Empty: replaces nothing.
  Charsmap() = default;
  // InvalidArgument for bytes in another form. Whatever they are, nothing
  // outside of them is read.
  static absl::StatusOr<Charsmap> Create(std::string_view bytes);

  // The longest key that `text` begins with.
  Step Match(std::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string replacements_;  // each with a NUL after it
};

}  // namespace promptcache::worker
