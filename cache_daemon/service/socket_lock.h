#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/file_lock.h"

namespace promptcache::daemon {

// Makes the socket's folder (mode 0750) when it is missing. PermissionDenied
// when the folder belongs to neither this user nor root: whoever owns it could
// put a socket of his own in the place.
absl::Status MakeSocketFolder(const std::string& socket_path);

// Keeps other daemons away from a socket: the lock of "<path>.lock".
// FailedPrecondition, naming the process, when another one holds it.
absl::StatusOr<FileLock> LockSocket(const std::string& socket_path);

}  // namespace promptcache::daemon
