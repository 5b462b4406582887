#include "cuda/runtime/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/available_memory.h"
#include "common/status_macros.h"
#include "glog/logging.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace promptcache::gpu {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

absl::Status ErrnoStatus(const std::string& what, int error) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  switch (error) {
    case ENOMEM:
    case ENOSPC:
    case EFAULT:  // what a failed population gives
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::InternalError(message);
  }
}

// The setting in brackets decides whether madvise on a memfd means anything.
bool SharedHugePagesAllowed() {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string word;
  while (in >> word) {
    if (word.front() == '[') return word != "[never]" && word != "[deny]";
  }
  return false;
}

// Makes every page present and mapped. In one call: page faults one by one
// cost 24 times as much (measured).
absl::Status Populate(int fd, std::byte* base, uint64_t bytes) {
  if (::madvise(base, bytes, MADV_POPULATE_WRITE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) return ErrnoStatus("populating a segment", errno);
  // Before Linux 5.14: reserve (so that no touch can raise SIGBUS), then touch.
  if (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus("reserving a segment", errno);
  }
  volatile std::byte* bytes_of = base;
  for (uint64_t i = 0; i < bytes; i += 4096) bytes_of[i] = std::byte{0};
  return absl::OkStatus();
}

struct Mapping {
  UniqueFd fd;
  std::byte* base = nullptr;
  HostPages pages = HostPages::kPlain;
};

absl::StatusOr<Mapping> MapNew(const char* name, uint64_t bytes, bool hugetlb) {
  Mapping out;
  const unsigned flags =
      MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB : 0u);
  out.fd = UniqueFd(::memfd_create(name, flags));
  if (!out.fd) return ErrnoStatus("memfd_create", errno);
  if (::ftruncate(out.fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus("sizing a segment", errno);
  }
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                      out.fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus("mapping a segment", errno);
  out.base = static_cast<std::byte*>(base);
  if (hugetlb) {
    out.pages = HostPages::kHugeTlb;
  } else if (::madvise(base, bytes, MADV_HUGEPAGE) == 0 &&
             SharedHugePagesAllowed()) {
    out.pages = HostPages::kTransparent;
  }
  if (absl::Status s = Populate(out.fd.get(), out.base, bytes); !s.ok()) {
    ::munmap(base, bytes);
    return s;
  }
  return out;
}

}  // namespace

std::string_view HostPagesName(HostPages pages) {
  switch (pages) {
    case HostPages::kHugeTlb:
      return "memfd, reserved huge pages";
    case HostPages::kTransparent:
      return "memfd, transparent huge pages";
    case HostPages::kPlain:
      return "memfd, plain pages";
  }
  return "";
}

absl::StatusOr<HostSegment> HostSegment::Create(const char* name,
                                                uint64_t bytes) {
  if (bytes == 0) {
    return absl::InvalidArgumentError("a segment has at least one byte");
  }
  absl::StatusOr<Mapping> mapping = absl::ResourceExhaustedError("not tried");
  if (bytes % kHugePageBytes == 0) {
    mapping = MapNew(name, bytes, /*hugetlb=*/true);
  }
  if (!mapping.ok()) {
    // Populating more than there is would not fail but invoke the OOM killer.
    PC_RETURN_IF_ERROR(
        CheckMemory("a segment of memory", bytes, AvailableMemoryBytes()));
    mapping = MapNew(name, bytes, /*hugetlb=*/false);
  }
  if (!mapping.ok()) return mapping.status();

  HostSegment segment;
  segment.fd_ = std::move(mapping->fd);
  segment.base_ = mapping->base;
  segment.bytes_ = bytes;
  segment.pages_ = mapping->pages;
  if (::fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus("sealing a segment", errno);
  }
  VLOG(1) << "segment " << name << ": " << bytes << " bytes, "
          << HostPagesName(segment.pages_);
  return segment;
}

HostSegment::HostSegment(HostSegment&& other) noexcept {
  *this = std::move(other);
}

HostSegment& HostSegment::operator=(HostSegment&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = std::move(other.fd_);
    base_ = std::exchange(other.base_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    pages_ = other.pages_;
  }
  return *this;
}

HostSegment::~HostSegment() { Reset(); }

void HostSegment::Reset() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
  base_ = nullptr;
  bytes_ = 0;
  fd_.Reset();
}

absl::Status HostSegment::SealFutureWrites() {
  if (::fcntl(fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
    return ErrnoStatus("sealing a segment against writes", errno);
  }
  return absl::OkStatus();
}

absl::StatusOr<MappedSegment> MappedSegment::Map(UniqueFd fd, uint64_t bytes,
                                                 bool writable) {
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment descriptor: ", std::strerror(errno)));
  }
  if (bytes == 0 || static_cast<uint64_t>(st.st_size) != bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "segment has ", st.st_size, " bytes where ", bytes, " were told"));
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    // Could be truncated under us: a read would raise SIGBUS.
    return absl::InvalidArgumentError("segment is not sealed against resizing");
  }
  MappedSegment out;
  out.bytes_ = bytes;
  void* base =
      ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus("mapping a segment", errno);
  out.read_base_ = static_cast<const std::byte*>(base);
  if (writable) {
    base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_POPULATE, fd.get(), 0);
    if (base == MAP_FAILED) {
      return ErrnoStatus("mapping a segment writable", errno);
    }
    out.write_base_ = static_cast<std::byte*>(base);
  }
  out.fd_ = std::move(fd);
  return out;
}

MappedSegment::MappedSegment(MappedSegment&& other) noexcept {
  *this = std::move(other);
}

MappedSegment& MappedSegment::operator=(MappedSegment&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = std::move(other.fd_);
    read_base_ = std::exchange(other.read_base_, nullptr);
    write_base_ = std::exchange(other.write_base_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

MappedSegment::~MappedSegment() { Reset(); }

void MappedSegment::Reset() {
  if (read_base_ != nullptr) {
    ::munmap(const_cast<std::byte*>(read_base_), bytes_);
  }
  if (write_base_ != nullptr) ::munmap(write_base_, bytes_);
  read_base_ = nullptr;
  write_base_ = nullptr;
  bytes_ = 0;
  fd_.Reset();
}

}  // namespace promptcache::gpu
