#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_daemon/core/page_pool.h"

namespace promptcache::daemon {

// What a worker says of where it computes.
struct WorkerDevice {
  std::string uuid = "CPU";
  int driver_version = 0;  // 13000: CUDA 13.0
  std::vector<gpu::HandleKind> importable;
};

// Which of the pool's devices it is. FailedPrecondition when the worker cannot
// read the pool's memory in place; the words say what to change, and on which
// side.
absl::StatusOr<uint32_t> FindWorkerDevice(const WorkerDevice& worker,
                                          const PagePool& pool);

}  // namespace promptcache::daemon
