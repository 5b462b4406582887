#pragma once

#include <string>
#include <string_view>

namespace promptcache::worker {

// Unicode's Normalization Form C of `text`, which lies in `text` itself or in
// `*buffer`. Linear but for sorting marks: n log n in a run of them.
// REQUIRES: text is valid UTF-8.
std::string_view ToNfc(std::string_view text, std::string* buffer);

}  // namespace promptcache::worker
