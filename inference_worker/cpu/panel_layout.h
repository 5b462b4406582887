#pragma once

namespace promptcache::worker::cpu {

// How a panel (`panel_cols` weight rows, that is output columns) lies in
// memory. Either way a 32-bit lane holds two bf16.
enum class PanelLayout {
  // [depth][panel_cols / 2] lanes: columns j and j + panel_cols / 2 of one
  // depth, so that widening both is one shift and one mask.
  kColumnPairs,
  // [depth / 2][panel_cols] lanes: two consecutive depths of one column, as
  // vdpbf16ps and the AMX tiles take them. Depth is padded to 32 with zeros.
  kDepthPairs,
};

}  // namespace promptcache::worker::cpu
