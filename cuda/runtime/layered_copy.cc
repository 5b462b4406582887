#include "cuda/runtime/layered_copy.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace promptcache::gpu {
namespace {

// Less at once does not fill the bus.
constexpr size_t kGroupBytes = size_t{8} << 20;

}  // namespace

uint32_t LayersAtOnce(size_t num_pages, size_t page_bytes,
                      uint32_t num_layers) {
  const size_t layer_bytes =
      std::max<size_t>(num_pages * (page_bytes / num_layers), 1);
  const size_t layers = (kGroupBytes + layer_bytes - 1) / layer_bytes;
  return static_cast<uint32_t>(std::min<size_t>(layers, num_layers));
}

absl::StatusOr<std::vector<LayerGroup>> QueueLayeredCopy(
    Device& device, Stream& stream, std::span<const PageStretch> stretches,
    size_t page_bytes, uint32_t num_layers) {
  size_t num_pages = 0;
  for (const PageStretch& stretch : stretches) num_pages += stretch.num_pages;
  const uint32_t step = LayersAtOnce(num_pages, page_bytes, num_layers);
  const size_t layer_bytes = page_bytes / num_layers;
  std::vector<LayerGroup> groups;
  for (uint32_t first = 0; first < num_layers; first += step) {
    LayerGroup group{.end_layer = std::min(first + step, num_layers)};
    const size_t offset = first * layer_bytes;
    for (const PageStretch& stretch : stretches) {
      PC_RETURN_IF_ERROR(
          stream.Copy({.to = stretch.to + offset,
                       .to_pitch = page_bytes,
                       .from = stretch.from + offset,
                       .from_pitch = page_bytes,
                       .width = (group.end_layer - first) * layer_bytes,
                       .height = stretch.num_pages},
                      CopyKind::kToDevice));
    }
    PC_ASSIGN_OR_RETURN(group.done, device.NewEvent());
    PC_RETURN_IF_ERROR(stream.Record(group.done.get()));
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace promptcache::gpu
