#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_daemon/service/task_queue.h"
#include "common/rpc/grpc_status.h"
#include "grpcpp/grpcpp.h"

namespace promptcache::daemon {

// Answers a unary call on the task queue: `work` returns an absl::Status and
// may use the request and the response until then. A full queue is
// ResourceExhausted with RetryInfo.
template <typename Work>
grpc::ServerUnaryReactor* RunAsTask(TaskQueue* tasks,
                                    grpc::CallbackServerContext* context,
                                    Work work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool queued = tasks->Add([reactor, work = std::move(work)] {
    reactor->Finish(rpc::ToGrpcStatus(work()));
  });
  if (!queued) {
    absl::Status full =
        absl::ResourceExhaustedError("the cache daemon's task queue is full");
    rpc::SetRetryDelay(absl::Milliseconds(100), &full);
    reactor->Finish(rpc::ToGrpcStatus(full));
  }
  return reactor;
}

}  // namespace promptcache::daemon
