#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/case_result.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/private_pages.h"

namespace promptcache::worker {

// The limits that a case must keep. Choices of tokens are compared where the
// expected margin is above `margin`.
struct LogitLimits {
  double margin = 0;
  double mean_nll = 0;
  double logit = 0;  // of the best 40
  double logsumexp = 0;
  double last_rms = 0;  // of all logits of the last token

  // tests/data/smollm2/README.md.
  static LogitLimits Published() {
    return {.margin = 0.25, .mean_nll = 0.02, .logit = 0.3, .logsumexp = 0.3};
  }
  // tests/data/models/README.md, its advice for bf16.
  static LogitLimits TinyModel(bool modular) {
    return {.margin = 0.3, .logsumexp = 0.15, .last_rms = modular ? 0.2 : 0.15};
  }
  // The same for an encoder-decoder, whose logits are smaller.
  static LogitLimits TinyEncoderDecoder() {
    return {.margin = 0.1, .logsumexp = 0.15, .last_rms = 0.05};
  }
};

// How far a backend was from all the values compared.
struct LogitErrors {
  double max_logit = 0;
  double max_logsumexp = 0;
  double max_last_rms = 0;
  double max_encoder_rms = 0;  // of the encoder's last output
  double max_mean_nll = 0;
  double max_nll = 0;  // of a single token
  uint64_t num_choices = 0;
  // Other tokens chosen, whatever the margin; and the largest margin of one.
  uint64_t num_other_choices = 0;
  double max_margin_of_other = 0;
};

// Runs every case of a file in one of the formats of tests/data/smollm2 and
// tests/data/models (vector_file.h), each within the limits of its README. One
// result a case, in the file's order. `errors` may be null. InvalidArgument:
// not such a file. Other errors are the backend's or the pool's.
absl::StatusOr<std::vector<CaseResult>> CheckLogitVectors(
    std::string_view json_text, Backend& backend, PrivatePages& pages,
    LogitErrors* errors = nullptr);

}  // namespace promptcache::worker
