#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace promptcache::gpu {

// What a host segment's pages turned out to be.
enum class HostPages {
  kHugeTlb,      // reserved 2 MiB pages
  kTransparent,  // memfd, the kernel was asked for huge pages and allows them
  kPlain,        // memfd of 4 KiB pages
};
std::string_view HostPagesName(HostPages pages);

// One exportable allocation of a memory kind. The CPU implementation, for host
// tiers and for the device tier of a machine without a GPU: a memfd, populated
// and sealed against resizing at creation, mapped once. Move-only; empty when
// default-constructed.
class HostSegment {
 public:
  // Tries huge pages first and logs which kind was had. Every page is there
  // when this returns, zeroed. ResourceExhausted when the machine has no such
  // memory. REQUIRES: bytes > 0 (rounded up to whole pages by the kernel, but
  // bytes() stays as asked). `name` is seen in /proc/<pid>/maps.
  static absl::StatusOr<HostSegment> Create(const char* name, uint64_t bytes);
  HostSegment() = default;
  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&& other) noexcept;
  ~HostSegment();

  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  HostPages pages() const { return pages_; }

  // From now on nobody else can map the segment writable; this mapping stays.
  // For the generation array.
  absl::Status SealFutureWrites();

 private:
  void Reset();

  UniqueFd fd_;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  HostPages pages_ = HostPages::kPlain;
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
  void Reset();

  UniqueFd fd_;
  const std::byte* read_base_ = nullptr;
  std::byte* write_base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace promptcache::gpu
