#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"

namespace promptcache::gpu {

// Pages that lie side by side on both sides.
struct PageStretch {
  std::byte* to = nullptr;          // on the device
  const std::byte* from = nullptr;  // in pinned host memory
  size_t num_pages = 0;
};

// Layers that are copied together; all before `end_layer` have arrived once
// `done` has been passed.
struct LayerGroup {
  uint32_t end_layer = 0;
  std::unique_ptr<Event> done;
};

// How many layers of a module of that size are copied at once: 8 MiB of them,
// or all when the module is smaller.
uint32_t LayersAtOnce(size_t num_pages, size_t page_bytes, uint32_t num_layers);

// Queues a copy of whole pages to the device so that the first layers can be
// read while the others are under way: for each group of layers one 2-D copy a
// stretch, and an event after it. A page is [num_layers][equal parts]. Groups
// are in the order of layers; the last one ends with num_layers.
//
// After an error something may be queued all the same: synchronize `stream`
// before the pages are given away. REQUIRES: num_layers > 0 divides page_bytes.
absl::StatusOr<std::vector<LayerGroup>> QueueLayeredCopy(
    Device& device, Stream& stream, std::span<const PageStretch> stretches,
    size_t page_bytes, uint32_t num_layers);

}  // namespace promptcache::gpu
