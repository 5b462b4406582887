#pragma once

#include "inference_worker/engine/kv_memory.h"

namespace promptcache::worker {

// The kernel of cuda/kernels/page_sum, for KvMemory::Options::sum_pages.
KvMemory::SumPages PageSumKernel();

}  // namespace promptcache::worker
