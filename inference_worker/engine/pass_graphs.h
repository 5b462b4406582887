#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/runtime/cuda_graph.h"
#include "cuda/runtime/device.h"

namespace promptcache::worker {

// Passes that come again, recorded and queued as a whole.
// Thread-compatible. Must not outlive the device.
class PassGraphs {
 public:
  // A pass of more rows is long enough for its launches not to show.
  static constexpr int32_t kMaxRows = 64;

  // Everything that a recorded pass depends on, besides addresses and what the
  // memory there holds.
  using Key = std::vector<size_t>;

  // Queues `body`, which queues work on `stream` and waits for nothing: at
  // first as it is (cuBLASLt chooses algorithms then), recorded when a pass of
  // the same key comes a second time, replayed from then on.
  absl::Status Run(const Key& key, gpu::Stream& stream,
                   absl::FunctionRef<absl::Status()> body);
  // Given what a Reserve said of memory that passes use: true, or an error,
  // when it is not where it was, and then nothing that is recorded holds.
  absl::Status AfterReserve(const absl::StatusOr<bool>& moved);

 private:
  static constexpr size_t kMaxGraphs = 32;

  std::map<Key, gpu::CudaGraph> graphs_;
  std::set<Key> seen_once_;
};

}  // namespace promptcache::worker
