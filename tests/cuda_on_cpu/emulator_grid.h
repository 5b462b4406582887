#pragma once

#include <cstddef>
#include <functional>

#include "device_emulator.h"

namespace promptcache::gpu::emu {

// Runs a grid to its end, its blocks over a fixed pool of OS threads. One grid
// at a time; any thread may call it.
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes,
             const std::function<void()>& thread_body);

}  // namespace promptcache::gpu::emu
