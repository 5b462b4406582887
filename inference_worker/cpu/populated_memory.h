#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"

namespace promptcache::worker::cpu {

// Anonymous memory that is mapped and populated in one call (a page fault costs
// 12-14 us here), with huge pages where the system gives them. Zeroed, aligned
// to a page. A move-only handle; default-constructed: empty.
class PopulatedMemory {
 public:
  // ResourceExhausted when the system refuses, or has less than that left:
  // `available_bytes`, or what it says itself.
  static absl::StatusOr<PopulatedMemory> Allocate(
      size_t num_bytes, std::optional<uint64_t> available_bytes = {});
  PopulatedMemory() = default;
  ~PopulatedMemory() { Reset(); }
  PopulatedMemory(PopulatedMemory&& other) noexcept {
    *this = std::move(other);
  }
  PopulatedMemory& operator=(PopulatedMemory&& other) noexcept;

  void Reset();
  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace promptcache::worker::cpu
