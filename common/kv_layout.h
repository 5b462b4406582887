#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/digest.h"

namespace promptcache {

enum class KvType : uint32_t { kBf16 = 1, kFp16 = 2 };

// How one page of KV lies in memory:
//
//   [layer][K|V][kv_head][page_tokens][head_dim]     contiguous, row-major
//
// A page holds `page_tokens` tokens of every layer. Keys rest rotated to the
// local positions of their module; values carry no position.
// A value type; the daemon uses page_bytes() and nothing else of it.
struct KvLayout {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t page_tokens = 16;
  KvType type = KvType::kBf16;
  // Raised when the order of the axes or the meaning of a byte changes.
  uint32_t version = 1;

  friend bool operator==(const KvLayout&, const KvLayout&) = default;

  absl::Status Validate() const;
  size_t element_bytes() const { return 2; }
  // Bytes between two tokens of one head.
  size_t token_stride_bytes() const { return head_dim * element_bytes(); }
  // Bytes between two heads of one layer's K or V.
  size_t head_stride_bytes() const {
    return page_tokens * token_stride_bytes();
  }
  // Bytes of K (or of V) of one layer in a page.
  size_t plane_bytes() const { return num_kv_heads * head_stride_bytes(); }
  size_t page_bytes() const { return size_t{2} * num_layers * plane_bytes(); }
  size_t key_offset_bytes(uint32_t layer) const {
    return size_t{2} * layer * plane_bytes();
  }
  size_t value_offset_bytes(uint32_t layer) const {
    return key_offset_bytes(layer) + plane_bytes();
  }
  uint64_t PagesFor(uint64_t num_tokens) const {
    return (num_tokens + page_tokens - 1) / page_tokens;
  }
  // Identity for module keys: everything but page_tokens, which says where a
  // token lies and not what it is.
  Digest Fingerprint() const;
  std::string ToString() const;
};

}  // namespace promptcache
