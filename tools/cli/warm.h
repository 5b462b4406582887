#pragma once

#include "absl/status/statusor.h"
#include "tools/cli/client.h"

namespace promptcache::cli {

// Warms with a progress bar (on a terminal); the last state told.
absl::StatusOr<v1::WarmModulesResponse> WarmWithProgress(
    WorkerClient* worker, const v1::WarmModulesRequest& request);

}  // namespace promptcache::cli
