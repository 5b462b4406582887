#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/call_requests.h"
#include "inference_worker/serving/queued_write_reactor.h"
#include "inference_worker/serving/scheduler.h"
#include "promptcache/v1/inference.pb.h"

namespace promptcache::worker {

// One Generate call: the scheduler's sink on one side, the stream on the
// other. Finishes the stream when the scheduler says that the request is done,
// and not before. Shared: by gRPC (through `self_`, until its OnDone), by the
// scheduler and by the task that compiles the prompt.
class GenerateReactor final : public QueuedWriteReactor<v1::GenerateResponse>,
                              public GenerationSink {
 public:
  // The call has entered `limit`, and leaves it when it is done.
  static std::shared_ptr<GenerateReactor> Create(Scheduler* scheduler,
                                                 CallLimit* limit,
                                                 std::string request_id,
                                                 bool include_plan);

  // Compiled: goes to the scheduler. Or the call ends with that status.
  void Start(absl::StatusOr<GenerationRequest> request);

  void OnStarted(const StartedEvent& event) override;
  void OnToken(TokenEvent event) override;
  void OnDone(const absl::Status& status, const CompletedEvent& event) override;
  bool Ready() override { return ready(); }
  bool CaughtUp() override { return caught_up(); }

 private:
  GenerateReactor(Scheduler* scheduler, CallLimit* limit,
                  std::string request_id, bool include_plan);
  void OnDrained() override { scheduler_->Wake(); }
  void OnFinish() override { limit_->Answered(); }
  void OnCancel() override { requests_.Cancel(); }
  void OnDone() override;

  Scheduler* const scheduler_;
  CallLimit* const limit_;
  CallRequests requests_;
  const std::string request_id_;
  const bool include_plan_;
  std::shared_ptr<GenerateReactor> self_;
  // Set by Start before the scheduler knows of the request.
  std::shared_ptr<const CompiledPrompt> prompt_;
  bool with_logprobs_ = false;
  bool matched_ = false;
  pml::Exactness exactness_ = pml::Exactness::kModular;
};

}  // namespace promptcache::worker
