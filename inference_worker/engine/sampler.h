#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace promptcache::worker {

// Order: repetition penalty, temperature, top-k, top-p, min-p, then one draw
// from the rest by inverse transform of a counter-based generator: step n of
// seed s always draws the same number, so that the same seed gives the same
// answer whatever ran beside it.
struct SamplingOptions {
  float temperature = 0;         // 0: greedy (lowest id wins a tie)
  uint32_t top_k = 0;            // 0: off
  float top_p = 1;               // 1: off
  float min_p = 0;               // 0: off
  float repetition_penalty = 1;  // 1: off
  // The penalty counts the last tokens of the history only; 0: off.
  uint32_t repetition_window = 64;
  uint64_t seed = 0;

  // InvalidArgument names the field and its value.
  absl::Status Validate() const;
};

// The number drawn at a step, in [0, 1): a function of seed and step alone.
double UniformDraw(uint64_t seed, uint64_t step);

// One step's choice, all that is needed to make it where the logits are
// (Backend::chooses_tokens).
struct TokenChoice {
  SamplingOptions options;
  // What the repetition penalty applies to, each id once, ascending; ids out of
  // the vocabulary are ignored. Points into the sampler that describes the
  // step.
  std::span<const int32_t> penalized;
  double uniform = 0;  // UniformDraw of the step
  int32_t token = -1;  // what was chosen; of whoever chooses
};

// Thread-compatible; one per request, so it keeps nothing of the vocabulary's
// size. A logit that is not a number counts as one that can never be chosen; if
// none can, the lowest id is returned.
class Sampler {
 public:
  // REQUIRES: options.Validate().ok()
  explicit Sampler(const SamplingOptions& options) : options_(options) {}

  // `history`: prompt and generated tokens so far (for the penalty); ids out
  // of the vocabulary are ignored.
  // REQUIRES: logits is not empty.
  int32_t Sample(std::span<const float> logits,
                 std::span<const int32_t> history);

  // In two parts, for whoever has the logits: what the next step is, valid
  // until the next call of either, and that a token was chosen by it. A step
  // that is described and not counted is described again.
  TokenChoice NextChoice(std::span<const int32_t> history);
  void CountStep() { ++step_; }
  // What a choice with this sampler's options comes to.
  int32_t Choose(std::span<const float> logits,
                 const TokenChoice& choice) const;

 private:
  const SamplingOptions options_;
  uint64_t step_ = 0;
  std::vector<int32_t> penalized_;
};

// log-softmax of the `count` best ids, best first (ties: lower id first).
std::vector<std::pair<int32_t, float>> TopLogprobs(
    std::span<const float> logits, uint32_t count);
// Id of the best logit; lowest id of a tie.
int32_t Argmax(std::span<const float> logits);
// Best minus second-best logit.
float Margin(std::span<const float> logits);

}  // namespace promptcache::worker
