#include "inference_worker/serving/generate_reactor.h"

#include <utility>

#include "absl/time/clock.h"
#include "common/rpc/duration.h"
#include "inference_worker/serving/proto_convert.h"

namespace promptcache::worker {

std::shared_ptr<GenerateReactor> GenerateReactor::Create(Scheduler* scheduler,
                                                         CallLimit* limit,
                                                         std::string request_id,
                                                         bool include_plan) {
  std::shared_ptr<GenerateReactor> reactor(new GenerateReactor(
      scheduler, limit, std::move(request_id), include_plan));
  reactor->self_ = reactor;
  return reactor;
}

GenerateReactor::GenerateReactor(Scheduler* scheduler, CallLimit* limit,
                                 std::string request_id, bool include_plan)
    : scheduler_(scheduler),
      limit_(limit),
      requests_(scheduler),
      request_id_(std::move(request_id)),
      include_plan_(include_plan) {}

void GenerateReactor::Start(absl::StatusOr<GenerationRequest> request) {
  // The call may be over before this function is.
  const std::shared_ptr<GenerateReactor> self = self_;
  if (!request.ok()) return End(ToClientStatus(request.status(), *limit_));
  prompt_ = request->prompt;
  matched_ = request->matched;
  with_logprobs_ = request->top_logprobs > 0;
  // Full attention computes no module by itself, whatever the plan has.
  exactness_ = request->full_attention ? pml::Exactness::kExact
                                       : prompt_->plan->exactness;
  const absl::Status submitted = requests_.Submit(*std::move(request), self);
  if (!submitted.ok()) End(ToClientStatus(submitted, *limit_));
}

void GenerateReactor::OnStarted(const StartedEvent& event) {
  v1::GenerateResponse response;
  v1::Started* started = response.mutable_started();
  ToProto(event.usage, started->mutable_usage());
  started->set_exactness(ToProto(exactness_));
  MissesToProto(*prompt_->plan, event.misses, started->mutable_misses());
  if (include_plan_) {
    SpansToProto(*prompt_->plan, event.spans, started->mutable_spans());
  }
  if (matched_) started->set_matched_schema(prompt_->plan->schema);
  started->set_request_id(request_id_);
  for (const std::string& notice : event.notices) started->add_notices(notice);
  rpc::SetDuration(event.ttft, started->mutable_ttft());
  Push(std::move(response));
}

void GenerateReactor::OnToken(TokenEvent event) {
  v1::GenerateResponse response;
  ToProto(event, with_logprobs_, response.mutable_delta());
  Push(std::move(response));
}

void GenerateReactor::OnDone(const absl::Status& status,
                             const CompletedEvent& event) {
  limit_->RequestDone(absl::Now());
  if (status.ok()) {
    v1::GenerateResponse response;
    ToProto(event, exactness_, response.mutable_completed());
    Push(std::move(response));
  }
  End(ToClientStatus(status, *limit_));
}

void GenerateReactor::OnDone() {
  limit_->Leave();
  self_.reset();  // may be the last
}

}  // namespace promptcache::worker
