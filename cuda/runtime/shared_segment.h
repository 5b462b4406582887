#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/unique_fd.h"

namespace promptcache::gpu {

// How a segment travels to another process. The numbers are those of
// promptcache.node.v1.HandleKind.
enum class HandleKind : uint32_t {
  kMemfd = 1,    // host memory, descriptor by SCM_RIGHTS
  kCudaIpc = 2,  // cudaMalloc memory, 64 bytes that travel by gRPC
  kCudaFd = 3,   // CUDA VMM allocation, descriptor by SCM_RIGHTS
};
inline constexpr size_t kIpcHandleBytes = 64;
std::string_view HandleKindName(HandleKind kind);  // "memfd", "ipc", "fd"
std::optional<HandleKind> ParseHandleKind(std::string_view name);

// One exportable allocation, zeroed, on the device or (kMemfd) on the host.
// Its memory must not be freed while importers may have it mapped: for CUDA IPC
// that is undefined, so owners keep segments for the life of the process.
class SharedSegment {
 public:
  virtual ~SharedSegment() = default;
  virtual std::byte* base() const = 0;
  virtual uint64_t num_bytes() const = 0;
  virtual HandleKind kind() const = 0;
  bool on_host() const { return kind() == HandleKind::kMemfd; }
  // What it is made of, for people: "memfd, plain pages", "cuda fd".
  virtual std::string description() const = 0;
  // Either a descriptor, which stays the segment's own, or kIpcHandleBytes
  // bytes.
  virtual int fd() const = 0;
  virtual const std::string& ipc_handle() const = 0;
  // Importers can map it so that they cannot write: always for kMemfd, never
  // for kCudaIpc, as the driver says for kCudaFd.
  virtual bool importable_read_only() const = 0;
};

// A handle as it was received.
struct SegmentHandle {
  HandleKind kind = HandleKind::kMemfd;
  uint64_t num_bytes = 0;
  UniqueFd fd;             // kMemfd, kCudaFd
  std::string ipc_handle;  // kCudaIpc
};

// A segment of another process, mapped here once. Addresses hold as long as it
// lives; the exporter's death does not take the memory away.
class ImportedSegment {
 public:
  virtual ~ImportedSegment() = default;
  virtual const std::byte* read_base() const = 0;
  // For reservations only. The same address as read_base where the kind or the
  // driver cannot map read-only.
  virtual std::byte* write_base() const = 0;
  virtual uint64_t num_bytes() const = 0;
  virtual HandleKind kind() const = 0;
  bool on_host() const { return kind() == HandleKind::kMemfd; }
  // Reading addresses cannot be written through, by hardware.
  bool read_only() const { return read_base() != write_base(); }
};

}  // namespace promptcache::gpu
