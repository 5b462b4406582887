#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace promptcache::daemon {

// Makes the socket's folder (mode 0750) when it is missing. PermissionDenied
// when the folder belongs to neither this user nor root: whoever owns it could
// put a socket of his own in the place.
absl::Status MakeSocketFolder(const std::string& socket_path);

// Keeps other daemons away from a socket as long as it lives, and no longer
// than the process, however that ends: a lock on "<path>.lock", which names
// the process. The file stays; removing it would let two daemons hold it.
class SocketLock {
 public:
  // FailedPrecondition, naming the process, when another one holds it.
  static absl::StatusOr<SocketLock> Take(const std::string& socket_path);

 private:
  explicit SocketLock(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace promptcache::daemon
