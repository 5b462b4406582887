#include "tools/cli/plan_text.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {

std::string MissText(v1::MissReason reason,
                     const std::string& differing_field) {
  std::string text = EnumWord(v1::MissReason_descriptor(), reason);
  if (!differing_field.empty()) absl::StrAppend(&text, ": ", differing_field);
  return text;
}

std::string PlanText(
    const google::protobuf::RepeatedPtrField<v1::SpanSummary>& spans) {
  std::vector<std::vector<std::string>> rows{
      {"position", "tokens", "span", "states"}};
  for (const auto& span : spans) {
    std::string name = span.module();
    if (name.empty()) name = span.cached() ? "(preamble)" : "(prompt's text)";
    std::string states = EnumWord(v1::SpanSource_descriptor(), span.source());
    if (states.empty()) states = span.cached() ? "cacheable" : "fresh";
    const std::string reason =
        MissText(span.miss_reason(), span.differing_field());
    if (!reason.empty()) absl::StrAppend(&states, " (", reason, ")");
    rows.push_back({absl::StrCat(span.start()), absl::StrCat(span.num_tokens()),
                    name, states});
  }
  return FormatTable(rows, "");
}

}  // namespace promptcache::cli
