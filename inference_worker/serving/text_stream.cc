#include "inference_worker/serving/text_stream.h"

#include <algorithm>
#include <utility>

namespace promptcache::worker {

size_t StopFilter::HeldBack() const {
  size_t longest = 0;
  for (const std::string& stop : stops_) {
    size_t n = std::min(stop.size() - 1, held_.size());
    for (; n > longest; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) longest = n;
    }
  }
  return longest;
}

std::string StopFilter::Push(std::string_view text) {
  if (stopped_) return "";
  held_.append(text);
  size_t best_end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (best_end == std::string::npos || end < best_end ||
        (end == best_end && stop.size() > stop_string_.size())) {
      best_end = end;
      stop_string_ = stop;
    }
  }
  std::string shown;
  if (best_end != std::string::npos) {
    stopped_ = true;
    shown = held_.substr(0, best_end - stop_string_.size());
    held_.clear();
    return shown;
  }
  shown = held_.substr(0, held_.size() - HeldBack());
  held_.erase(0, shown.size());
  return shown;
}

std::string StopFilter::Finish() {
  return stopped_ ? "" : std::exchange(held_, "");
}

}  // namespace promptcache::worker
