#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace promptcache {

// A SHA-256 value. Ordered and hashable, so that it serves as a map key.
struct Digest {
  std::array<uint8_t, 32> bytes{};

  friend auto operator<=>(const Digest&, const Digest&) = default;
  bool IsZero() const { return *this == Digest{}; }
  std::string ToHex() const;
  // The 32 bytes as they travel in protos.
  std::string ToBytes() const {
    return std::string(reinterpret_cast<const char*>(bytes.data()),
                       bytes.size());
  }
  // InvalidArgument unless `raw` has 32 bytes.
  static absl::StatusOr<Digest> FromBytes(std::string_view raw);
  // InvalidArgument unless `hex` has 64 hexadecimal digits.
  static absl::StatusOr<Digest> FromHex(std::string_view hex);

  template <typename H>
  friend H AbslHashValue(H h, const Digest& d) {
    uint64_t head;  // already uniform: eight bytes are hash enough
    std::memcpy(&head, d.bytes.data(), sizeof(head));
    return H::combine(std::move(h), head);
  }
};

// SHA-256 over length-prefixed, tagged fields, so that no two lists of fields
// have the same input: Add(tag, value) hashes `u32 tag length, tag, u64 value
// length, value` (little endian). AddRaw hashes bytes as they are.
// Thread-compatible. Add after Finish is a bug.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  Sha256& AddRaw(std::span<const std::byte> data);
  Sha256& Add(std::string_view tag, std::string_view value);
  Sha256& Add(std::string_view tag, uint64_t value);
  Sha256& Add(std::string_view tag, std::span<const int32_t> values);
  Sha256& Add(std::string_view tag, const Digest& value);
  Digest Finish();
  // Of what was added so far; more may be added.
  Digest Snapshot() const;

 private:
  void Update(const void* data, size_t num_bytes);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

Digest Sha256Of(std::string_view data);

}  // namespace promptcache
