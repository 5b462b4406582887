#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace promptcache {

// Debian's absl has a string_view of its own, which does not convert to or
// from the standard one. Our interfaces use std types; this is the adapter.
inline absl::string_view ToAbsl(std::string_view s) {
  return absl::string_view(s.data(), s.size());
}
inline std::string_view ToStd(absl::string_view s) {
  return std::string_view(s.data(), s.size());
}

}  // namespace promptcache
