#include "cuda/runtime/host_segments.h"

#include <string>
#include <utility>

#include "common/status_macros.h"
#include "cuda/runtime/segment.h"

namespace promptcache::gpu {
namespace {

class MemfdSegment final : public SharedSegment {
 public:
  explicit MemfdSegment(HostSegment segment) : segment_(std::move(segment)) {}
  std::byte* base() const override { return segment_.base(); }
  uint64_t num_bytes() const override { return segment_.bytes(); }
  HandleKind kind() const override { return HandleKind::kMemfd; }
  std::string description() const override {
    return std::string(HostPagesName(segment_.pages()));
  }
  int fd() const override { return segment_.fd(); }
  const std::string& ipc_handle() const override { return no_handle_; }
  bool importable_read_only() const override { return true; }

 private:
  HostSegment segment_;
  const std::string no_handle_;
};

class ImportedMemfd final : public ImportedSegment {
 public:
  explicit ImportedMemfd(MappedSegment segment)
      : segment_(std::move(segment)) {}
  const std::byte* read_base() const override { return segment_.read_base(); }
  std::byte* write_base() const override { return segment_.write_base(); }
  uint64_t num_bytes() const override { return segment_.bytes(); }
  HandleKind kind() const override { return HandleKind::kMemfd; }

 private:
  MappedSegment segment_;
};

}  // namespace

std::string_view HandleKindName(HandleKind kind) {
  switch (kind) {
    case HandleKind::kMemfd:
      return "memfd";
    case HandleKind::kCudaIpc:
      return "ipc";
    case HandleKind::kCudaFd:
      return "fd";
  }
  return "unknown";
}

std::optional<HandleKind> ParseHandleKind(std::string_view name) {
  for (const HandleKind kind :
       {HandleKind::kMemfd, HandleKind::kCudaIpc, HandleKind::kCudaFd}) {
    if (HandleKindName(kind) == name) return kind;
  }
  return std::nullopt;
}

absl::StatusOr<std::unique_ptr<SharedSegment>> NewMemfdSegment(
    const char* name, uint64_t num_bytes) {
  PC_ASSIGN_OR_RETURN(HostSegment segment,
                      HostSegment::Create(name, num_bytes));
  return std::make_unique<MemfdSegment>(std::move(segment));
}

absl::StatusOr<std::unique_ptr<ImportedSegment>> ImportMemfd(
    SegmentHandle handle) {
  PC_ASSIGN_OR_RETURN(MappedSegment mapped,
                      MappedSegment::Map(std::move(handle.fd), handle.num_bytes,
                                         /*writable=*/true));
  return std::make_unique<ImportedMemfd>(std::move(mapped));
}

}  // namespace promptcache::gpu
