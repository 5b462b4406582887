#include "inference_worker/serving/warm_reactor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "inference_worker/serving/proto_convert.h"

namespace promptcache::worker {
namespace {

// Between two looks at a full queue.
constexpr absl::Duration kRetryAfter = absl::Milliseconds(20);

}  // namespace

std::shared_ptr<WarmReactor> WarmReactor::Create(Scheduler* scheduler,
                                                 CallLimit* limit,
                                                 absl::Time deadline) {
  std::shared_ptr<WarmReactor> reactor(
      new WarmReactor(scheduler, limit, deadline));
  reactor->self_ = reactor;
  return reactor;
}

uint64_t WarmReactor::TokensOf(size_t index) const {
  return static_cast<uint64_t>(
      prompts_[index]->plan->modules.back().num_tokens());
}

void WarmReactor::Start(absl::StatusOr<Prompts> prompts) {
  const std::shared_ptr<WarmReactor> self = self_;
  if (!prompts.ok()) return End(ToClientStatus(prompts.status(), *limit_));
  prompts_ = *std::move(prompts);
  progress_.set_modules_total(static_cast<uint32_t>(prompts_.size()));
  uint64_t tokens = 0;
  for (size_t i = 0; i < prompts_.size(); ++i) tokens += TokensOf(i);
  progress_.set_tokens_total(tokens);
  SubmitNext();
}

void WarmReactor::SubmitNext() {
  if (next_ == prompts_.size()) {
    if (prompts_.empty()) Push(progress_);
    return End(grpc::Status::OK);
  }
  GenerationRequest request;
  request.prompt = prompts_[next_];
  request.max_tokens = 1;
  request.warm = true;
  request.arrival = absl::Now();
  request.deadline = deadline_;
  const absl::Status submitted = requests_.Submit(std::move(request), self_);
  if (absl::IsResourceExhausted(submitted) && absl::Now() < deadline_) {
    SubmitLater();
  } else if (!submitted.ok()) {
    End(ToClientStatus(submitted, *limit_));
  }
}

void WarmReactor::SubmitLater() {
  // A new one each time: this may be the old one's callback. It keeps what it
  // is given until it goes, hence the weak pointer.
  alarm_ = std::make_unique<grpc::Alarm>();
  alarm_->Set(absl::ToChronoTime(absl::Now() + kRetryAfter),
              [weak = std::weak_ptr<WarmReactor>(self_)](bool) {
                const std::shared_ptr<WarmReactor> self = weak.lock();
                if (self != nullptr) self->SubmitNext();
              });
}

void WarmReactor::OnDone(const absl::Status& status,
                         const CompletedEvent& event) {
  const std::shared_ptr<WarmReactor> self = self_;
  limit_->RequestDone(absl::Now());
  if (!status.ok()) return End(ToClientStatus(status, *limit_));
  const pml::PlanModule& module = prompts_[next_]->plan->modules.back();
  progress_.set_modules_done(progress_.modules_done() + 1);
  progress_.set_tokens_done(progress_.tokens_done() + TokensOf(next_));
  progress_.set_path(module.path);
  progress_.clear_notices();
  for (const std::string& notice : event.notices) {
    progress_.add_notices(notice);
  }
  const StateSource source = event.modules.back();
  if (source == StateSource::kRead) {
    progress_.set_already_cached(progress_.already_cached() + 1);
  } else if (source != StateSource::kCreated) {
    progress_.set_not_kept(progress_.not_kept() + 1);
    progress_.add_notices(
        absl::StrCat("module '", module.path, "' was not kept"));
  }
  Push(progress_);
  ++next_;
  SubmitNext();
}

void WarmReactor::OnDone() {
  limit_->Leave();
  self_.reset();  // may be the last
}

}  // namespace promptcache::worker
