#pragma once

#include <cstddef>
#include <cstdint>

namespace promptcache {

// Consecutive tokens of KV as attention reads them: one piece of a module, or
// one fresh span's tail. Token t (0 <= t < num_tokens) lies in page
// (first_token + t) / page_tokens of the table, at slot
// (first_token + t) % page_tokens.
//
// The table names pages and not runs, so that how an allocator happened to
// place a module can never change the order of summation: kernels split a view
// at fixed token counts from *its* first token.
//
// A plain value; `pages` and what they point to must outlive the call that the
// view is passed to. Memory behind it is read-only to attention.
struct KvView {
  // Page base addresses (layout: common/kv_layout.h).
  const std::byte* const* pages = nullptr;
  uint32_t first_token = 0;
  uint32_t num_tokens = 0;
  // The span's origin in the plan: key t rests rotated to
  // local_position + t and stands at position_offset + local_position + t.
  // A query at position p attends to it rotated to p - position_offset: so a
  // module is used at any place, and what is cached is never written.
  int32_t position_offset = 0;
  // Distance of token 0 from the origin.
  int32_t local_position = 0;
};

}  // namespace promptcache
