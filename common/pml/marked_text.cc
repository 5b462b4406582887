#include "common/pml/marked_text.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace promptcache::pml {

void MarkedText::AppendText(std::string_view text) {
  if (text.empty()) return;
  if (parts_.empty() || parts_.back().control) parts_.emplace_back();
  parts_.back().text += text;
}

void MarkedText::AppendMarkers(const std::vector<MarkerPart>& markers) {
  for (const MarkerPart& part : markers) {
    if (part.control) {
      parts_.push_back(part);
    } else {
      AppendText(part.text);
    }
  }
}

std::string MarkedText::Text() const {
  std::string out;
  for (const MarkerPart& part : parts_) out += part.text;
  return out;
}

absl::StatusOr<std::vector<int32_t>> MarkedText::Tokens(
    const Tokenizer& tokenizer) const {
  std::vector<int32_t> out;
  for (const MarkerPart& part : parts_) {
    if (!part.control) {
      const std::vector<int32_t> ids = tokenizer.Encode(part.text);
      out.insert(out.end(), ids.begin(), ids.end());
      continue;
    }
    const int32_t id = tokenizer.ControlToken(part.text);
    if (id < 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the model's tokenizer has no control token \"", part.text,
          "\", which its chat template needs: use --chat_template=plain"));
    }
    out.push_back(id);
  }
  return out;
}

}  // namespace promptcache::pml
