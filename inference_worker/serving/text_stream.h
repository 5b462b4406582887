#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace promptcache::worker {

// Looks for stop strings in a growing text. What may still become one is held
// back, so that no part of one is ever shown. The first stop string to be
// complete wins, the longest of those that end together: how the text was cut
// into pushes does not matter. Thread-compatible.
class StopFilter {
 public:
  // REQUIRES: no empty string.
  explicit StopFilter(std::vector<std::string> stops)
      : stops_(std::move(stops)) {}

  // Returns the text that may be shown now; nothing more once stopped().
  std::string Push(std::string_view text);
  // The end: what was held back.
  std::string Finish();

  bool stopped() const { return stopped_; }
  const std::string& stop_string() const { return stop_string_; }

 private:
  // Length of the longest end of held_ that begins a stop string.
  size_t HeldBack() const;

  const std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
  std::string stop_string_;
};

}  // namespace promptcache::worker
