#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/executor.h"
#include "inference_worker/serving/proto_convert.h"

namespace promptcache::worker {

// One unary call that is answered on an executor: counted, refused when too
// many are open, and not begun when its caller has left meanwhile. gRPC's
// until OnDone, where it deletes itself.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // `run` fills the response, which lives as long as the call.
  static grpc::ServerUnaryReactor* Start(CallLimit* limit, Executor* executor,
                                         std::function<absl::Status()> run) {
    auto* call = new UnaryCall(limit);
    if (absl::Status room = limit->Enter(); !room.ok()) {
      call->Answer(room);
      return call;
    }
    executor->Add([call, run = std::move(run)] {
      const absl::Status status =
          call->cancelled_ ? absl::CancelledError("cancelled by the caller")
                           : run();
      call->limit_->RequestDone(absl::Now());
      call->Answer(status);
    });
    return call;
  }

 private:
  explicit UnaryCall(CallLimit* limit) : limit_(limit) {}
  void Answer(const absl::Status& status) {
    limit_->Answered();
    Finish(ToClientStatus(status, *limit_));
  }
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override {
    limit_->Leave();
    delete this;
  }

  CallLimit* const limit_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace promptcache::worker
