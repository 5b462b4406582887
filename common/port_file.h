#pragma once

#include <string>

#include "absl/status/status.h"

namespace promptcache {

// Tells the port that a server got, as one line. Renamed into place: a reader
// never sees half of it. An empty path: nothing to do.
absl::Status WritePortFile(const std::string& path, int port);

}  // namespace promptcache
