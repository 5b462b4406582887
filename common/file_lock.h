#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace promptcache {

// Keeps others away from what a lock file stands for as long as it lives, and
// no longer than the process, however that ends: a lock (flock) on the file,
// which names the process. The file stays; removing it would let two hold it.
// Children that a program starts do not inherit it. Move-only.
class FileLock {
 public:
  struct Words {
    std::string who;   // "another daemon"
    std::string does;  // "serves /run/d.sock: stop it, or choose another one"
  };
  // FailedPrecondition, "WHO (process 123) DOES", when it is held.
  static absl::StatusOr<FileLock> Take(const std::string& path,
                                       const Words& words);

 private:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace promptcache
