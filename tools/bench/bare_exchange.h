#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/unique_fd.h"

namespace promptcache::bench {

// The least that an answer over a Unix socket takes on this machine: messages
// of which nothing is read, as long as what gRPC sends for an Acquire of 64
// modules and for its reply.
inline constexpr size_t kAskedBytes = 6400;
inline constexpr size_t kAnsweredBytes = 800;

// Answers all who connect to `path`, one at a time, until this process ends.
absl::Status AnswerExchanges(const std::string& path);

// One who asks. Thread-compatible.
class BareExchange {
 public:
  // Waits up to `timeout` for somebody to listen at `path`.
  static absl::StatusOr<BareExchange> Connect(const std::string& path,
                                              absl::Duration timeout);
  // There and back.
  absl::Status Once();

 private:
  explicit BareExchange(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace promptcache::bench
