#include "cuda/runtime/cuda_graph.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "common/status_macros.h"
#include "cuda/runtime/cuda_status.h"
#include "glog/logging.h"

namespace promptcache::gpu {

absl::StatusOr<CudaGraph> CudaGraph::Record(
    Stream& stream, absl::FunctionRef<absl::Status()> body) {
  PC_RETURN_IF_ERROR(ToStatus(
      cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal),
      "cudaStreamBeginCapture"));
  const absl::Status status = body();
  // Whatever `body` said, the stream must leave the recording.
  cudaGraph_t recorded = nullptr;
  const absl::Status ended = ToStatus(
      cudaStreamEndCapture(stream.native(), &recorded), "cudaStreamEndCapture");
  cudaGraphExec_t graph = nullptr;
  absl::Status made = status.ok() ? ended : status;
  if (made.ok()) {
    made = ToStatus(cudaGraphInstantiate(&graph, recorded, 0),
                    "cudaGraphInstantiate");
  }
  if (recorded != nullptr) {
    const absl::Status destroyed =
        ToStatus(cudaGraphDestroy(recorded), "cudaGraphDestroy");
    LOG_IF(ERROR, !destroyed.ok()) << destroyed.ToString();
  }
  if (!made.ok()) return made;
  return CudaGraph(graph);
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : graph_(std::exchange(other.graph_, nullptr)) {}

CudaGraph& CudaGraph::operator=(CudaGraph&& other) noexcept {
  std::swap(graph_, other.graph_);
  return *this;
}

CudaGraph::~CudaGraph() {
  if (graph_ == nullptr) return;
  const absl::Status status =
      ToStatus(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
  LOG_IF(ERROR, !status.ok()) << status.ToString();
}

absl::Status CudaGraph::Launch(Stream& stream) const {
  return ToStatus(cudaGraphLaunch(graph_, stream.native()), "cudaGraphLaunch");
}

}  // namespace promptcache::gpu
