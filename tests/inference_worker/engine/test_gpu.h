#pragma once

#include "cuda/runtime/device.h"

namespace promptcache::worker {

// The GPU of this process, opened once: emulated in tests of a build, a real
// one in those of tools/gpu_check. Ends the process where there is none.
gpu::Device* TestGpu();

}  // namespace promptcache::worker
