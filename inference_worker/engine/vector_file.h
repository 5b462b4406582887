#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace promptcache::worker {

// The files of tests/data/smollm2 and of tests/data/models (their READMEs say
// what the fields mean), with all formats as one: a plain text is a plan of one
// fresh item, explicit position ids are a plan of an item each run.
struct VectorSegment {
  std::vector<int32_t> ids;
  int32_t encode_start = 0;
  std::vector<size_t> context;  // lower indices
};

struct VectorItem {
  std::optional<size_t> segment;  // none: fresh
  std::vector<int32_t> fresh;
  int32_t start = 0;
};

struct VectorCase {
  std::string name;
  std::vector<VectorSegment> segments;
  // Ends in a fresh item, but for an encoder-decoder.
  std::vector<VectorItem> plan;
  // Of an encoder-decoder: what the decoder is fed with; else empty. It sees
  // the whole plan, and these are its tokens in all that follows.
  std::vector<int32_t> decoder_ids;
  std::vector<double> encoder_last;  // the encoder's last output; or empty
  // Of all fresh tokens in order.
  std::vector<int32_t> argmax;
  std::vector<double> margin;
  std::vector<double> logsumexp;  // or empty
  std::vector<double> nll;        // of the next fresh token; or empty
  // Of the last token.
  double last_logsumexp = 0;
  std::vector<int32_t> top_ids;
  std::vector<double> top_logits;
  std::vector<double> last_logits;  // all of them; or empty
  // After the last token; after the first token of decoder_ids alone.
  std::vector<int32_t> greedy_ids;
  std::vector<double> greedy_margins;
};

// InvalidArgument says what is wrong, with the case's name where there is one.
absl::StatusOr<std::vector<VectorCase>> ParseVectorFile(
    std::string_view json_text);

}  // namespace promptcache::worker
