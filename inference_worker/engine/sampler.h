#pragma once

#include <cstdint>
#include <span>
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
  uint32_t repetition_window = 64;
  uint64_t seed = 0;

  absl::Status Validate() const;
};

// Thread-compatible; one per request.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options) : options_(options) {}

  // `history`: prompt and generated tokens so far (for the penalty).
  int32_t Sample(std::span<const float> logits,
                 std::span<const int32_t> history);

 private:
  const SamplingOptions options_;
  uint64_t step_ = 0;
  std::vector<std::pair<float, int32_t>> scratch_;
};

// log-softmax of the `count` best ids, best first (ties: lower id first).
std::vector<std::pair<int32_t, float>> TopLogprobs(
    std::span<const float> logits, uint32_t count);
// Best minus second-best logit.
float Margin(std::span<const float> logits);

}  // namespace promptcache::worker
