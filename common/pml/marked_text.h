#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/chat_template.h"
#include "common/tokenizer.h"

namespace promptcache::pml {

// Text of a user and control tokens of the chat template, in order. What a
// user writes can only be appended as literal text: no text becomes a control
// token. Value type.
class MarkedText {
 public:
  // Neighbouring literal text is one piece: it is tokenised together.
  void AppendText(std::string_view text);
  void AppendMarkers(const std::vector<MarkerPart>& markers);
  void Clear() { parts_.clear(); }

  bool empty() const { return parts_.empty(); }
  const std::vector<MarkerPart>& parts() const { return parts_; }
  // Everything as text, for digests and people.
  std::string Text() const;
  // FailedPrecondition when the tokenizer lacks a control token.
  absl::StatusOr<std::vector<int32_t>> Tokens(const Tokenizer& tokenizer) const;

 private:
  std::vector<MarkerPart> parts_;
};

}  // namespace promptcache::pml
