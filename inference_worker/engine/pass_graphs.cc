#include "inference_worker/engine/pass_graphs.h"

#include <utility>

#include "common/status_macros.h"

namespace promptcache::worker {

absl::Status PassGraphs::Run(const Key& key, gpu::Stream& stream,
                             absl::FunctionRef<absl::Status()> body) {
  auto it = graphs_.find(key);
  if (it == graphs_.end()) {
    if (seen_once_.insert(key).second) return body();
    if (graphs_.size() == kMaxGraphs) graphs_.clear();
    PC_ASSIGN_OR_RETURN(gpu::CudaGraph graph,
                        gpu::CudaGraph::Record(stream, body));
    it = graphs_.emplace(key, std::move(graph)).first;
  }
  return it->second.Launch(stream);
}

absl::Status PassGraphs::AfterReserve(const absl::StatusOr<bool>& moved) {
  if (!moved.ok() || *moved) {
    graphs_.clear();
    seen_once_.clear();
  }
  return moved.status();
}

}  // namespace promptcache::worker
