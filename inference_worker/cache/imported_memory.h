#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/segment.h"

namespace promptcache::worker {

// Pages as this process sees them: parallel arrays.
struct PageRefs {
  std::vector<const std::byte*> read;
  std::vector<std::byte*> write;  // if asked for
  // Words of the generation array.
  std::vector<const uint64_t*> generations;
  bool on_host = true;  // false: addresses of the device, for kernels only
};

// The daemon's memory, mapped into this process for one session: every segment
// and the array of page generations. Const after Configure; then thread-safe.
// Addresses hold as long as it lives.
class ImportedMemory {
 public:
  // Connects to the descriptor socket and receives what comes by descriptor;
  // nothing but the generation array is mapped yet. `device` (null: the CPU)
  // will import, and must outlive it. Unavailable when nobody listens there.
  static absl::StatusOr<ImportedMemory> Receive(const std::string& fd_socket,
                                                gpu::Device* device,
                                                absl::Duration timeout);
  ImportedMemory(ImportedMemory&&) = default;
  ImportedMemory& operator=(ImportedMemory&&) = default;

  // What the session's first message presents.
  const std::string& token() const { return token_; }
  gpu::Device& device() const { return *device_; }

  // What the daemon's welcome says of a segment.
  struct Told {
    uint32_t segment = 0;
    gpu::HandleKind kind = gpu::HandleKind::kMemfd;
    uint64_t num_bytes = 0;  // 0: as the descriptor came
    std::string ipc_handle;  // of kCudaIpc
  };
  // Maps them; descriptors of others are closed. InvalidArgument when what was
  // received is not what is told.
  absl::Status Import(std::span<const Told> segments);
  // Where progress words lie, counted in words of the generation array.
  struct ProgressWords {
    uint64_t begin = 0;
    uint32_t count = 0;
  };
  // InvalidArgument when that cannot be of what was imported.
  absl::Status Configure(uint64_t page_bytes, uint32_t generations_stride,
                         const ProgressWords& progress);

  // Adds a run's pages. InvalidArgument when it is not within its segment, or
  // on the host where the runs before it are on the device. `writable`: with
  // addresses to write to.
  absl::Status AppendRun(uint32_t segment, uint32_t first_page,
                         uint32_t num_pages, bool writable,
                         PageRefs* pages) const;
  // InvalidArgument when there is no such word.
  absl::StatusOr<const uint64_t*> ProgressWordAt(uint32_t word) const;

 private:
  ImportedMemory() = default;
  absl::StatusOr<gpu::SegmentHandle> HandleOf(const Told& told);

  std::string token_;
  std::unique_ptr<gpu::Device> cpu_;  // when no other was given
  gpu::Device* device_ = nullptr;
  std::map<uint32_t, gpu::SegmentHandle> received_;
  std::map<uint32_t, std::unique_ptr<gpu::ImportedSegment>> segments_;
  gpu::MappedSegment generations_;
  uint64_t page_bytes_ = 0;
  uint32_t generations_stride_ = 0;
  ProgressWords progress_;
};

}  // namespace promptcache::worker
