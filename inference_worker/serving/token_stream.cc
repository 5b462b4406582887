#include "inference_worker/serving/token_stream.h"

#include <algorithm>
#include <utility>

#include "glog/logging.h"

namespace promptcache::worker {

TokenStream::TokenStream(const Tokenizer* tokenizer,
                         const GenerationRequest& request, uint32_t room)
    : tokenizer_(tokenizer),
      max_tokens_(std::min(request.max_tokens, room)),
      reason_at_max_(room < request.max_tokens ? FinishReason::kContext
                                               : FinishReason::kMaxTokens),
      ignore_eos_(request.ignore_eos),
      top_logprobs_(request.top_logprobs),
      sampler_(request.sampling),
      stops_(request.stop) {
  for (const pml::PlanSpan& span : request.prompt->plan->spans) {
    history_.insert(history_.end(), span.tokens.begin(), span.tokens.end());
  }
}

void TokenStream::Describe(std::span<const float> logits, TokenEvent* event) {
  sha256_.AddRaw(std::as_bytes(logits));
  event->top = TopLogprobs(logits, top_logprobs_);
  const auto& [best, best_logprob] = event->top.front();
  const float log_sum = logits[static_cast<size_t>(best)] - best_logprob;
  event->logprob = logits[static_cast<size_t>(event->id)] - log_sum;
  event->margin = Margin(logits);
}

TokenEvent TokenStream::Next(std::span<const float> logits) {
  TokenEvent event;
  event.id = sampler_.Sample(logits, history_);
  if (top_logprobs_ > 0) Describe(logits, &event);
  return Finish(std::move(event));
}

TokenEvent TokenStream::Next(int32_t chosen) {
  sampler_.CountStep();
  TokenEvent event;
  event.id = chosen;
  return Finish(std::move(event));
}

std::optional<TokenChoice> TokenStream::NextChoice() {
  if (top_logprobs_ > 0) return std::nullopt;
  return sampler_.NextChoice(history_);
}

TokenEvent TokenStream::Finish(TokenEvent event) {
  CHECK(!finished()) << "token " << event.id << " after the last one";
  history_.push_back(event.id);
  generated_.push_back(event.id);

  const std::vector<int32_t>& ends = tokenizer_->stop_ids();
  if (!ignore_eos_ &&
      std::find(ends.begin(), ends.end(), event.id) != ends.end()) {
    reason_ = FinishReason::kStop;
  } else {
    event.text = stops_.Push(utf8_.Push(tokenizer_->Decode(event.id)));
    if (stops_.stopped()) {
      reason_ = FinishReason::kStopString;
    } else if (generated_.size() >= max_tokens_) {
      reason_ = reason_at_max_;
    }
  }
  if (finished() && !stops_.stopped()) {
    event.text += stops_.Push(utf8_.Finish());
    event.text += stops_.Finish();
    if (stops_.stopped()) reason_ = FinishReason::kStopString;
  }
  return event;
}

std::string TokenStream::LogitsSha256() {
  return top_logprobs_ > 0 ? sha256_.Finish().ToHex() : "";
}

}  // namespace promptcache::worker
