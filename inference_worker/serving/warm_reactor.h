#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "grpcpp/alarm.h"
#include "inference_worker/serving/call_limit.h"
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
  bool cancelled() const ABSL_LOCKS_EXCLUDED(cancel_mu_) {
    MutexLock lock(&cancel_mu_);
    return cancelled_;
  }

  void OnStarted(const StartedEvent&) override {}
  void OnToken(TokenEvent) override {}
  void OnDone(const absl::Status& status, const CompletedEvent& event) override;

 private:
  WarmReactor(Scheduler* scheduler, CallLimit* limit, absl::Time deadline)
      : scheduler_(scheduler), limit_(limit), deadline_(deadline) {}
  void OnDrained() override {}
  void OnCancel() override;
  void OnDone() override;
  void SubmitNext();
  void SubmitLater();
  uint64_t TokensOf(size_t index) const;

  Scheduler* const scheduler_;
  CallLimit* const limit_;
  const absl::Time deadline_;
  std::shared_ptr<WarmReactor> self_;
  // By one thread at a time: Start's, then the scheduler's or the alarm's.
  Prompts prompts_;
  size_t next_ = 0;
  v1::WarmModulesResponse progress_;
  std::unique_ptr<grpc::Alarm> alarm_;

  mutable Mutex cancel_mu_;
  bool cancelled_ ABSL_GUARDED_BY(cancel_mu_) = false;
  std::shared_ptr<CancelFlag> flag_ ABSL_GUARDED_BY(cancel_mu_);
};

}  // namespace promptcache::worker
