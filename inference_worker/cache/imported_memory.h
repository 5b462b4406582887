#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cuda/runtime/segment.h"

namespace promptcache::worker {

// Pages as this process sees them: parallel arrays.
struct PageRefs {
  std::vector<const std::byte*> read;
  std::vector<std::byte*> write;
  // Words of the generation array.
  std::vector<const uint64_t*> generations;
};

// The daemon's memory, mapped into this process for one session: every segment
// and the array of page generations. Const after Configure; then thread-safe.
// Addresses hold as long as it lives.
class ImportedMemory {
 public:
  // Connects to the descriptor socket, receives and maps everything.
  // Unavailable when nobody listens there.
  static absl::StatusOr<ImportedMemory> Receive(const std::string& fd_socket,
                                                absl::Duration timeout);
  ImportedMemory(ImportedMemory&&) = default;
  ImportedMemory& operator=(ImportedMemory&&) = default;

  // What the session's first message presents.
  const std::string& token() const { return token_; }

  // What the daemon's welcome says of the memory; InvalidArgument when that
  // cannot be of what was received.
  absl::Status Configure(uint64_t page_bytes, uint32_t generations_stride,
                         std::span<const uint32_t> segment_ids);

  // Adds a run's pages. InvalidArgument when it is not within its segment.
  absl::Status AppendRun(uint32_t segment, uint32_t first_page,
                         uint32_t num_pages, PageRefs* pages) const;

 private:
  ImportedMemory() = default;

  std::string token_;
  std::map<uint32_t, gpu::MappedSegment> segments_;
  gpu::MappedSegment generations_;
  uint64_t page_bytes_ = 0;
  uint32_t generations_stride_ = 0;
};

}  // namespace promptcache::worker
