#include "inference_worker/cache/imported_memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/fault_point.h"
#include "common/fd_socket.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "common/unique_fd.h"
#include "glog/logging.h"

namespace promptcache::worker {
namespace {

constexpr uint32_t kMaxSegments = 65536;

absl::StatusOr<FdWelcome> SayHello(int socket, const std::string& fd_socket,
                                   const std::string& device_uuid,
                                   absl::Duration timeout) {
  const UniqueFd self(
      static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!self) return absl::ErrnoToStatus(errno, "pidfd_open");
  FdHello hello;
  // The last byte stays 0.
  device_uuid.copy(hello.device_uuid.data(), hello.device_uuid.size() - 1);
  PC_RETURN_IF_ERROR(SendWithFd(socket, &hello, sizeof(hello), self.get()));
  FdWelcome welcome;
  PC_RETURN_IF_ERROR(
      ReceiveWithFd(socket, &welcome, sizeof(welcome), timeout).status());
  if (welcome.magic != kFdMagic || welcome.num_segments > kMaxSegments) {
    return absl::InvalidArgumentError(absl::StrCat(
        fd_socket, " does not speak the descriptor protocol (magic ",
        absl::Hex(welcome.magic), ", ", welcome.num_segments, " segments)"));
  }
  return welcome;
}

}  // namespace

absl::StatusOr<ImportedMemory> ImportedMemory::Receive(
    const std::string& fd_socket, gpu::Device* device, absl::Duration timeout) {
  PC_ASSIGN_OR_RETURN(const UniqueFd socket, ConnectUnix(fd_socket));
  ImportedMemory memory;
  if (device == nullptr) memory.cpu_ = gpu::NewHostDevice();
  memory.device_ = device == nullptr ? memory.cpu_.get() : device;
  PC_ASSIGN_OR_RETURN(
      const FdWelcome welcome,
      SayHello(socket.get(), fd_socket, memory.device_->info().uuid, timeout));
  memory.token_.assign(welcome.token.begin(), welcome.token.end());
  for (uint32_t i = 0; i < welcome.num_segments; ++i) {
    FdSegment told;
    PC_ASSIGN_OR_RETURN(
        UniqueFd fd, ReceiveWithFd(socket.get(), &told, sizeof(told), timeout));
    if (told.kind == FdKind::kGenerations) {
      PC_ASSIGN_OR_RETURN(memory.generations_,
                          gpu::MappedSegment::Map(std::move(fd), told.bytes,
                                                  /*writable=*/false));
      continue;
    }
    memory.received_[told.segment] = {.kind = told.kind == FdKind::kCudaSegment
                                                  ? gpu::HandleKind::kCudaFd
                                                  : gpu::HandleKind::kMemfd,
                                      .num_bytes = told.bytes,
                                      .fd = std::move(fd)};
  }
  return memory;
}

absl::StatusOr<gpu::SegmentHandle> ImportedMemory::HandleOf(const Told& told) {
  if (told.kind == gpu::HandleKind::kCudaIpc) {
    return gpu::SegmentHandle{.kind = told.kind,
                              .num_bytes = told.num_bytes,
                              .ipc_handle = told.ipc_handle};
  }
  const auto received = received_.find(told.segment);
  if (received == received_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", told.segment, " was named but never sent"));
  }
  gpu::SegmentHandle handle = std::move(received->second);
  received_.erase(received);
  if (handle.kind != told.kind ||
      (told.num_bytes != 0 && handle.num_bytes != told.num_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "segment ", told.segment, " came as ",
        ToAbsl(gpu::HandleKindName(handle.kind)), " of ", handle.num_bytes,
        " bytes, told were ", ToAbsl(gpu::HandleKindName(told.kind)), " of ",
        told.num_bytes));
  }
  return handle;
}

absl::Status ImportedMemory::Import(std::span<const Told> segments) {
  uint64_t device_bytes = 0;
  bool read_only = true;
  for (const Told& told : segments) {
    PC_ASSIGN_OR_RETURN(gpu::SegmentHandle handle, HandleOf(told));
    absl::StatusOr<std::unique_ptr<gpu::ImportedSegment>> imported =
        device_->Import(std::move(handle));
    if (!imported.ok()) {
      return absl::Status(imported.status().code(),
                          absl::StrCat("importing segment ", told.segment, ": ",
                                       imported.status().message()));
    }
    if (!(*imported)->on_host()) {
      device_bytes += (*imported)->num_bytes();
      read_only = read_only && (*imported)->read_only();
    }
    segments_[told.segment] = *std::move(imported);
  }
  FaultPoint("imported");
  received_.clear();
  if (device_bytes > 0) {
    LOG(INFO) << "imported " << device_bytes << " bytes of "
              << device_->info().uuid
              << (read_only ? ", mapped read-only for reading"
                            : ": no read-only mapping here, reading addresses "
                              "are writable");
  }
  return absl::OkStatus();
}

absl::Status ImportedMemory::Configure(uint64_t page_bytes,
                                       uint32_t generations_stride,
                                       const ProgressWords& progress) {
  if (page_bytes == 0 || generations_stride == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("pages of ", page_bytes, " bytes, ", generations_stride,
                     " generations a segment"));
  }
  for (const auto& [id, segment] : segments_) {
    const uint64_t due_bytes =
        (uint64_t{id} + 1) * generations_stride * sizeof(uint64_t);
    if (due_bytes > generations_.bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the generation array has ", generations_.bytes(),
                       " bytes, segment ", id, " needs ", due_bytes));
    }
  }
  const uint64_t num_words = generations_.bytes() / sizeof(uint64_t);
  if (progress.begin > num_words ||
      progress.count > num_words - progress.begin) {
    return absl::InvalidArgumentError(
        absl::StrCat("progress words ", progress.begin, " + ", progress.count,
                     " of an array of ", num_words));
  }
  page_bytes_ = page_bytes;
  generations_stride_ = generations_stride;
  progress_ = progress;
  return absl::OkStatus();
}

absl::Status ImportedMemory::AppendRun(uint32_t segment, uint32_t first_page,
                                       uint32_t num_pages, bool writable,
                                       PageRefs* pages) const {
  const auto found = segments_.find(segment);
  const uint64_t end_page = uint64_t{first_page} + num_pages;
  if (found == segments_.end() || end_page > generations_stride_ ||
      end_page > found->second->num_bytes() / page_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", segment, ": pages ", first_page, " + ",
                     num_pages, " of ", page_bytes_, " bytes are not there"));
  }
  const gpu::ImportedSegment& mapped = *found->second;
  if (pages->read.empty()) pages->on_host = mapped.on_host();
  if (pages->on_host != mapped.on_host()) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", segment, ": a module lies in two tiers"));
  }
  const auto* words =
      reinterpret_cast<const uint64_t*>(generations_.read_base()) +
      uint64_t{segment} * generations_stride_;
  for (uint64_t page = first_page; page < end_page; ++page) {
    pages->read.push_back(mapped.read_base() + page * page_bytes_);
    if (writable) {
      pages->write.push_back(mapped.write_base() + page * page_bytes_);
    }
    pages->generations.push_back(words + page);
  }
  return absl::OkStatus();
}

absl::StatusOr<const uint64_t*> ImportedMemory::ProgressWordAt(
    uint32_t word) const {
  if (word >= progress_.count) {
    return absl::InvalidArgumentError(
        absl::StrCat("progress word ", word, " of ", progress_.count));
  }
  return reinterpret_cast<const uint64_t*>(generations_.read_base()) +
         progress_.begin + word;
}

}  // namespace promptcache::worker
