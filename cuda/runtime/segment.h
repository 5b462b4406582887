#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace promptcache::gpu {

// One exportable allocation of a memory kind. The CPU implementation, for host
// tiers and for the device tier of a machine without a GPU: a memfd, populated
// and sealed against resizing at creation, mapped once. Move-only; empty when
// default-constructed.
class HostSegment {
 public:
  // Tries huge pages first and logs which kind was had. ResourceExhausted when
  // the machine has no such memory.
  static absl::StatusOr<HostSegment> Create(const char* name, uint64_t bytes);
  HostSegment() = default;
  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&& other) noexcept;
  ~HostSegment();

  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
};

// The importer's side: one process maps a received segment twice, read-only
// for attention, and writable for reservations only (`writable` false: not at
// all, as for the generation array).
class MappedSegment {
 public:
  // InvalidArgument when the descriptor's size or seals are not as told.
  static absl::StatusOr<MappedSegment> Map(UniqueFd fd, uint64_t bytes,
                                           bool writable);
  MappedSegment() = default;
  MappedSegment(MappedSegment&& other) noexcept;
  MappedSegment& operator=(MappedSegment&& other) noexcept;
  ~MappedSegment();

  const std::byte* read_base() const { return read_base_; }
  std::byte* write_base() const { return write_base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  UniqueFd fd_;
  const std::byte* read_base_ = nullptr;
  std::byte* write_base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace promptcache::gpu
