#include "inference_worker/cache/imported_memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fd_socket.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace promptcache::worker {
namespace {

constexpr uint32_t kMaxSegments = 65536;

}  // namespace

absl::StatusOr<ImportedMemory> ImportedMemory::Receive(
    const std::string& fd_socket, absl::Duration timeout) {
  PC_ASSIGN_OR_RETURN(const UniqueFd socket, ConnectUnix(fd_socket));
  const UniqueFd self(
      static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!self) return absl::ErrnoToStatus(errno, "pidfd_open");
  const FdHello hello;
  PC_RETURN_IF_ERROR(
      SendWithFd(socket.get(), &hello, sizeof(hello), self.get()));
  FdWelcome welcome;
  PC_RETURN_IF_ERROR(
      ReceiveWithFd(socket.get(), &welcome, sizeof(welcome), timeout).status());
  if (welcome.magic != kFdMagic || welcome.num_segments > kMaxSegments) {
    return absl::InvalidArgumentError(absl::StrCat(
        fd_socket, " does not speak the descriptor protocol (magic ",
        absl::Hex(welcome.magic), ", ", welcome.num_segments, " segments)"));
  }
  ImportedMemory memory;
  memory.token_.assign(welcome.token.begin(), welcome.token.end());
  for (uint32_t i = 0; i < welcome.num_segments; ++i) {
    FdSegment told;
    PC_ASSIGN_OR_RETURN(
        UniqueFd fd, ReceiveWithFd(socket.get(), &told, sizeof(told), timeout));
    const bool pages = told.kind == FdKind::kSegment;
    PC_ASSIGN_OR_RETURN(gpu::MappedSegment mapped,
                        gpu::MappedSegment::Map(std::move(fd), told.bytes,
                                                /*writable=*/pages));
    if (pages) {
      memory.segments_[told.segment] = std::move(mapped);
    } else {
      memory.generations_ = std::move(mapped);
    }
  }
  return memory;
}

absl::Status ImportedMemory::Configure(uint64_t page_bytes,
                                       uint32_t generations_stride,
                                       std::span<const uint32_t> segment_ids) {
  if (page_bytes == 0 || generations_stride == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages of ", page_bytes, " bytes, ", generations_stride,
                     " generations a segment"));
  }
  for (const uint32_t id : segment_ids) {
    if (!segments_.contains(id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment ", id, " was named but never sent"));
    }
    const uint64_t due_bytes =
        (uint64_t{id} + 1) * generations_stride * sizeof(uint64_t);
    if (due_bytes > generations_.bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the generation array has ", generations_.bytes(),
                       " bytes, segment ", id, " needs ", due_bytes));
    }
  }
  page_bytes_ = page_bytes;
  generations_stride_ = generations_stride;
  return absl::OkStatus();
}

absl::Status ImportedMemory::AppendRun(uint32_t segment, uint32_t first_page,
                                       uint32_t num_pages,
                                       PageRefs* pages) const {
  const auto found = segments_.find(segment);
  const uint64_t end_page = uint64_t{first_page} + num_pages;
  if (found == segments_.end() || end_page > generations_stride_ ||
      end_page > found->second.bytes() / page_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", segment, ": pages ", first_page, " + ",
                     num_pages, " of ", page_bytes_, " bytes are not there"));
  }
  const gpu::MappedSegment& mapped = found->second;
  const auto* words =
      reinterpret_cast<const uint64_t*>(generations_.read_base()) +
      uint64_t{segment} * generations_stride_;
  for (uint64_t page = first_page; page < end_page; ++page) {
    pages->read.push_back(mapped.read_base() + page * page_bytes_);
    pages->write.push_back(mapped.write_base() + page * page_bytes_);
    pages->generations.push_back(words + page);
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
