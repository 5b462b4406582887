// promptcache-probe-gpu: what this machine's GPU and driver let processes do
// with each other's memory, by CUDA IPC handles and by VMM descriptors: read in
// place, write in place, and whether a read-only mapping refuses writes.
// Exits with 77 where there is no GPU. tools/gpu_check runs it.

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/fd_socket.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"
#include "cuda/runtime/gpus.h"

namespace promptcache::bench {
namespace {

constexpr size_t kBytes = size_t{2} << 20;
constexpr uint8_t kWritten = 0xA5;   // by the exporter, first half
constexpr uint8_t kAnswered = 0x3C;  // by the importer, second half
const absl::Duration kPatience = absl::Seconds(60);

// What travels with a descriptor; a test of one kind, or (0 bytes) none.
struct Offer {
  gpu::HandleKind kind = gpu::HandleKind::kCudaIpc;
  uint64_t num_bytes = 0;
  char ipc_handle[gpu::kIpcHandleBytes] = {};
};
struct Answer {
  bool ok = false;
  char text[255] = {};
};

absl::StatusOr<std::unique_ptr<gpu::Device>> OpenFirst() {
  return gpu::OpenGpu(gpu::FindGpus(), "");
}

absl::Status Fill(gpu::Device& device, void* to, uint8_t value, size_t count) {
  const std::vector<uint8_t> bytes(count, value);
  PC_ASSIGN_OR_RETURN(const auto stream, device.NewStream());
  PC_RETURN_IF_ERROR(
      stream->Copy(to, bytes.data(), count, gpu::CopyKind::kToDevice));
  return stream->Synchronize();
}

absl::StatusOr<bool> Holds(gpu::Device& device, const void* from, uint8_t value,
                           size_t count) {
  std::vector<uint8_t> bytes(count);
  PC_ASSIGN_OR_RETURN(const auto stream, device.NewStream());
  PC_RETURN_IF_ERROR(
      stream->Copy(bytes.data(), from, count, gpu::CopyKind::kToHost));
  PC_RETURN_IF_ERROR(stream->Synchronize());
  return static_cast<size_t>(std::count(bytes.begin(), bytes.end(), value)) ==
         count;
}

// Reads what the exporter wrote and answers in the second half.
absl::StatusOr<std::string> UseInPlace(gpu::Device& device,
                                       gpu::ImportedSegment& segment) {
  constexpr size_t kHalf = kBytes / 2;
  PC_ASSIGN_OR_RETURN(const bool read,
                      Holds(device, segment.read_base(), kWritten, kHalf));
  if (!read) return absl::DataLossError("read other bytes than were written");
  PC_RETURN_IF_ERROR(
      Fill(device, segment.write_base() + kHalf, kAnswered, kHalf));
  return absl::StrCat("read and written in place, ",
                      segment.read_only() ? "reading addresses read-only"
                                          : "no read-only mapping");
}

// Must fail; the process is of no use to CUDA afterwards.
absl::StatusOr<std::string> WriteThroughReadOnly(
    gpu::Device& device, gpu::ImportedSegment& segment) {
  if (!segment.read_only()) return std::string("no read-only mapping");
  const absl::Status status =
      Fill(device, const_cast<std::byte*>(segment.read_base()), 0, kBytes);
  if (status.ok())
    return absl::InternalError("a read-only mapping was written");
  return absl::StrCat("a write is refused: ", std::string(status.message()));
}

// A child's work: one offer, one answer.
int Import(int socket, bool write_read_only) {
  Offer offer;
  auto fd = ReceiveWithFd(socket, &offer, sizeof(offer), kPatience);
  if (!fd.ok()) return 1;
  const auto used = [&]() -> absl::StatusOr<std::string> {
    if (offer.num_bytes == 0) return absl::CancelledError("not exported");
    PC_ASSIGN_OR_RETURN(const auto device, OpenFirst());
    gpu::SegmentHandle handle;
    handle.kind = offer.kind;
    handle.num_bytes = offer.num_bytes;
    if (offer.kind == gpu::HandleKind::kCudaIpc) {
      handle.ipc_handle.assign(offer.ipc_handle, gpu::kIpcHandleBytes);
    } else {
      handle.fd = *std::move(fd);
    }
    PC_ASSIGN_OR_RETURN(const auto segment, device->Import(std::move(handle)));
    return write_read_only ? WriteThroughReadOnly(*device, *segment)
                           : UseInPlace(*device, *segment);
  }();
  Answer answer;
  answer.ok = used.ok();
  const std::string text = used.ok() ? *used : used.status().ToString();
  std::strncpy(answer.text, text.c_str(), sizeof(answer.text) - 1);
  SendWithFd(socket, &answer, sizeof(answer), -1).IgnoreError();  // we end
  return 0;
}

class Child {
 public:
  // Before CUDA is initialised here: a fork would inherit it, broken.
  explicit Child(bool write_read_only) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      _exit(Import(ends[1], write_read_only));
    }
    close(ends[1]);
    socket_ = UniqueFd(ends[0]);
  }
  ~Child() {
    socket_.Reset();
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  Child(Child&&) = delete;

  absl::StatusOr<std::string> Offer(const bench::Offer& offer, int fd) {
    PC_RETURN_IF_ERROR(SendWithFd(socket_.get(), &offer, sizeof(offer), fd));
    Answer answer;
    PC_RETURN_IF_ERROR(
        ReceiveWithFd(socket_.get(), &answer, sizeof(answer), kPatience)
            .status());
    if (!answer.ok) return absl::InternalError(answer.text);
    return std::string(answer.text);
  }

 private:
  UniqueFd socket_;
  pid_t pid_ = -1;
};

struct Probe {
  const char* name;
  gpu::HandleKind kind;
  bool write_read_only;
  std::unique_ptr<Child> child;
};

absl::StatusOr<std::string> Run(gpu::Device& device, Probe& probe) {
  PC_ASSIGN_OR_RETURN(const auto segment,
                      device.NewSegment("probe", kBytes, probe.kind));
  PC_RETURN_IF_ERROR(Fill(device, segment->base(), kWritten, kBytes));
  Offer offer = {.kind = probe.kind, .num_bytes = kBytes};
  const std::string& handle = segment->ipc_handle();
  std::memcpy(offer.ipc_handle, handle.data(),
              std::min(handle.size(), sizeof(offer.ipc_handle)));
  PC_ASSIGN_OR_RETURN(const std::string text,
                      probe.child->Offer(offer, segment->fd()));
  if (probe.write_read_only) {
    PC_ASSIGN_OR_RETURN(const bool whole,
                        Holds(device, segment->base(), kWritten, kBytes));
    if (!whole) return absl::DataLossError("bytes have changed");
    return text;
  }
  PC_ASSIGN_OR_RETURN(
      const bool answered,
      Holds(device, segment->base() + kBytes / 2, kAnswered, kBytes / 2));
  if (!answered) return absl::DataLossError("what was written is not there");
  return text;
}

int Main() {
  Probe probes[] = {{"CUDA IPC handle", gpu::HandleKind::kCudaIpc, false, {}},
                    {"VMM descriptor", gpu::HandleKind::kCudaFd, false, {}},
                    {"read-only probe", gpu::HandleKind::kCudaFd, true, {}}};
  for (Probe& probe : probes) {
    probe.child = std::make_unique<Child>(probe.write_read_only);
  }
  const auto device = OpenFirst();
  if (!device.ok()) {
    std::fprintf(stderr, "promptcache-probe-gpu: %s\n",
                 std::string(device.status().message()).c_str());
    return 77;  // skipped
  }
  std::printf("%s\n", (*device)->info().ToString().c_str());
  int failed = 0;
  for (Probe& probe : probes) {
    const auto result = Run(**device, probe);
    std::printf(
        "%s: %s\n", probe.name,
        result.ok() ? result->c_str() : result.status().ToString().c_str());
    if (!result.ok()) failed = 1;
  }
  return failed;
}

}  // namespace
}  // namespace promptcache::bench

int main() { return promptcache::bench::Main(); }
