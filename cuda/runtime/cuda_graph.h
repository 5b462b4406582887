#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"

struct CUgraphExec_st;

namespace promptcache::gpu {

// Work of a stream that was recorded once and is queued as a whole: one call
// instead of hundreds. Addresses and launch shapes are those of the recording,
// what the memory holds is not. Move-only; empty when default-constructed. Must
// not outlive the device.
class CudaGraph {
 public:
  // Runs `body`, which queues work on `stream` and waits for nothing; the work
  // is recorded and not done. What `body` fails with is the result.
  static absl::StatusOr<CudaGraph> Record(
      Stream& stream, absl::FunctionRef<absl::Status()> body);
  CudaGraph() = default;
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph& operator=(CudaGraph&& other) noexcept;
  ~CudaGraph();

  bool empty() const { return graph_ == nullptr; }
  // Queues everything. REQUIRES: not empty.
  absl::Status Launch(Stream& stream) const;

 private:
  explicit CudaGraph(CUgraphExec_st* graph) : graph_(graph) {}

  CUgraphExec_st* graph_ = nullptr;
};

}  // namespace promptcache::gpu
