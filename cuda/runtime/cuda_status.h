#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

// Only for sources that are built with the toolkit.
namespace promptcache::gpu {

// OK, or a status that names `call` and CUDA's error: ResourceExhausted for
// want of memory, Unavailable without a driver or a GPU, Unimplemented for what
// is not supported here, InvalidArgument for a value that CUDA refuses, else
// Internal. Clears the thread's last error, so that
// no later launch is blamed for it.
absl::Status ToStatus(cudaError_t error, std::string_view call);

}  // namespace promptcache::gpu
