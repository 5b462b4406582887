#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace promptcache::worker {

// How many calls of a worker's services may be open at once, all kinds
// together: what bounds the executors' queues. Thread-safe.
class CallLimit {
 public:
  explicit CallLimit(uint32_t max_calls) : max_calls_(max_calls) {}
  CallLimit(const CallLimit&) = delete;
  CallLimit& operator=(const CallLimit&) = delete;

  // ResourceExhausted when there are too many. Leave is due in either case,
  // when the call is over.
  absl::Status Enter() {
    if (open_.fetch_add(1) < max_calls_) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", max_calls_, " calls are open"));
  }
  void Leave() { open_.fetch_sub(1); }

 private:
  const uint32_t max_calls_;
  std::atomic<uint32_t> open_{0};
};

}  // namespace promptcache::worker
