#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/digest.h"
#include "common/tokenizer.h"
#include "inference_worker/engine/sampler.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/text_stream.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::worker {

// Logits to tokens to text, and when to stop. Thread-compatible.
class TokenStream {
 public:
  // `room`: tokens that fit into the model's context. Must not outlive the
  // tokenizer.
  TokenStream(const Tokenizer* tokenizer, const GenerationRequest& request,
              uint32_t room);

  // One step, from logits or, when the token was chosen as NextChoice says,
  // from that. REQUIRES: !finished().
  TokenEvent Next(std::span<const float> logits);
  TokenEvent Next(int32_t chosen);
  // How the next token is chosen, for who has the logits, valid until the next
  // step; none where the logits are wanted, for log-probabilities.
  std::optional<TokenChoice> NextChoice();

  bool finished() const { return reason_ != FinishReason::kNone; }
  FinishReason finish_reason() const { return reason_; }
  const std::string& stop_string() const { return stops_.stop_string(); }
  const std::vector<int32_t>& generated() const { return generated_; }
  // Over the logits of every step; "" unless log-probabilities were asked for.
  std::string LogitsSha256();

 private:
  // What follows from the token, and its event.
  TokenEvent Finish(TokenEvent event);
  void Describe(std::span<const float> logits, TokenEvent* event);

  const Tokenizer* const tokenizer_;
  const uint32_t max_tokens_;
  const FinishReason reason_at_max_;
  const bool ignore_eos_;
  const uint32_t top_logprobs_;
  Sampler sampler_;
  StopFilter stops_;
  Utf8Stream utf8_;
  Sha256 sha256_;
  std::vector<int32_t> history_;  // for the penalty: the prompt, then these
  std::vector<int32_t> generated_;
  FinishReason reason_ = FinishReason::kNone;
};

}  // namespace promptcache::worker
