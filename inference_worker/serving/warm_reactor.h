#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/alarm.h"
#include "inference_worker/serving/call_limit.h"
#include "inference_worker/serving/call_requests.h"
#include "inference_worker/serving/queued_write_reactor.h"
#include "inference_worker/serving/scheduler.h"
#include "promptcache/v1/inference.pb.h"

namespace promptcache::worker {

// One WarmModules call: a warm request to the scheduler for each module, one
// after the other, a message after each. While the scheduler's queue is full
// it waits, until the call's deadline. Shared like a GenerateReactor.
class WarmReactor final : public QueuedWriteReactor<v1::WarmModulesResponse>,
                          public GenerationSink {
 public:
  using Prompts = std::vector<std::shared_ptr<const CompiledPrompt>>;

  // The call has entered `limit`, and leaves it when it is done.
  static std::shared_ptr<WarmReactor> Create(Scheduler* scheduler,
                                             CallLimit* limit,
                                             absl::Time deadline);
  // One prompt a module, that module the last of its plan.
  void Start(absl::StatusOr<Prompts> prompts);
  bool cancelled() const { return requests_.cancelled(); }

  void OnStarted(const StartedEvent&) override {}
  void OnToken(TokenEvent) override {}
  void OnDone(const absl::Status& status, const CompletedEvent& event) override;

 private:
  WarmReactor(Scheduler* scheduler, CallLimit* limit, absl::Time deadline)
      : limit_(limit), requests_(scheduler), deadline_(deadline) {}
  void OnDrained() override {}
  void OnFinish() override { limit_->Answered(); }
  void OnCancel() override { requests_.Cancel(); }
  void OnDone() override;
  void SubmitNext();
  void SubmitLater();
  uint64_t TokensOf(size_t index) const;

  CallLimit* const limit_;
  CallRequests requests_;
  const absl::Time deadline_;
  std::shared_ptr<WarmReactor> self_;
  // By one thread at a time: Start's, then the scheduler's or the alarm's.
  Prompts prompts_;
  size_t next_ = 0;
  v1::WarmModulesResponse progress_;
  std::unique_ptr<grpc::Alarm> alarm_;
};

}  // namespace promptcache::worker
