#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "inference_worker/serving/queued_write_reactor.h"
#include "inference_worker/serving/scheduler.h"
#include "promptcache/v1/inference.pb.h"

namespace promptcache::worker {

// One WarmModules call: a warm request to the scheduler for each module, one
// after the other, a message after each. Shared like a GenerateReactor.
class WarmReactor final : public QueuedWriteReactor<v1::WarmModulesResponse>,
                          public GenerationSink {
 public:
  using Prompts = std::vector<std::shared_ptr<const CompiledPrompt>>;

  static std::shared_ptr<WarmReactor> Create(Scheduler* scheduler,
                                             absl::Time deadline);
  // One prompt a module, that module the last of its plan.
  void Start(absl::StatusOr<Prompts> prompts);

  void OnStarted(const StartedEvent&) override {}
  void OnToken(TokenEvent) override {}
  void OnDone(const absl::Status& status, const CompletedEvent& event) override;

 private:
  WarmReactor(Scheduler* scheduler, absl::Time deadline)
      : scheduler_(scheduler), deadline_(deadline) {}
  void OnDrained() override {}
  void OnCancel() override;
  void OnDone() override { self_.reset(); }
  void SubmitNext();
  uint64_t TokensOf(size_t index) const;

  Scheduler* const scheduler_;
  const absl::Time deadline_;
  std::shared_ptr<WarmReactor> self_;
  // By one thread at a time: Start's, then the scheduler's.
  Prompts prompts_;
  size_t next_ = 0;
  v1::WarmModulesResponse progress_;

  Mutex cancel_mu_;
  bool cancelled_ ABSL_GUARDED_BY(cancel_mu_) = false;
  std::shared_ptr<CancelFlag> flag_ ABSL_GUARDED_BY(cancel_mu_);
};

}  // namespace promptcache::worker
