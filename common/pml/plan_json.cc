#include "common/pml/plan_json.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/pml/borders.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

using nlohmann::ordered_json;

const PlanModule* StatesOf(const Plan& plan, const PlanSpan& span) {
  return span.module < 0 ? nullptr
                         : &plan.modules[static_cast<size_t>(span.module)];
}

// The co-encoded members' names; "" when the states are the module's own.
std::string ScaffoldOf(const Plan& plan, const PlanSpan& span) {
  const PlanModule* states = StatesOf(plan, span);
  return states == nullptr ? "" : absl::StrJoin(states->scaffold, " ");
}

std::string_view KindName(SpanKind kind) {
  return kind == SpanKind::kCached ? "cached" : "fresh";
}

std::string_view ExactnessName(Exactness exactness) {
  return exactness == Exactness::kExact ? "EXACT" : "MODULAR";
}

std::string Dump(const ordered_json& value) {
  return value.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/false,
                    ordered_json::error_handler_t::replace);
}

std::string RowName(const Plan& plan, const PlanSpan& span) {
  if (!span.name.empty()) return span.name;
  return StatesOf(plan, span) == nullptr ? "(text)" : "(preamble)";
}

// The beginning of the span's text on one line.
std::string Excerpt(const PlanSpan& span, const Tokenizer& tokenizer) {
  constexpr size_t kMaxBytes = 40;
  std::string text;
  for (const int32_t id : span.tokens) {
    const std::string bytes = tokenizer.Decode(id);
    text += bytes.empty() ? "\xE2\x96\xAA" : bytes;  // a control token
    if (text.size() > kMaxBytes) break;
  }
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool continues = (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80;
    if (i >= kMaxBytes && !continues) return out + "...";
    if (text[i] == '\n') {
      out += "\\n";
    } else {
      out += text[i];
    }
  }
  return out;
}

ordered_json PlanJson(const Plan& plan) {
  ordered_json spans = ordered_json::array();
  for (const PlanSpan& span : plan.spans) {
    ordered_json s = {{"kind", KindName(span.kind)},
                      {"module", span.name},
                      {"start", span.start},
                      {"tokens", span.tokens}};
    const std::string scaffold = ScaffoldOf(plan, span);
    if (!scaffold.empty()) s["scaffold"] = scaffold;
    spans.push_back(std::move(s));
  }
  return {{"exactness", ExactnessName(plan.exactness)},
          {"tokens", plan.num_tokens},
          {"cached_tokens", plan.num_cached_tokens},
          {"spans", std::move(spans)}};
}

}  // namespace

std::string PlanToJson(const Plan& plan) { return Dump(PlanJson(plan)); }

std::string PlanToJson(const Plan& plan, const Tokenizer& tokenizer) {
  ordered_json json = PlanJson(plan);
  const std::vector<std::string> warnings = PlanBorders(plan, tokenizer);
  if (!warnings.empty()) json["warnings"] = warnings;
  return Dump(json);
}

std::string ErrorToJson(const PmlError& error) {
  ordered_json e = {{"reason", error.reason}, {"in", SourceName(error.source)}};
  if (error.place.line > 0) e["line"] = error.place.line;
  if (error.place.column > 0) e["column"] = error.place.column;
  if (!error.detail.empty()) e["message"] = error.detail;
  for (const auto& [name, number] : error.numbers) e[name] = number;
  return Dump({{"error", std::move(e)}});
}

std::string PlanToTable(const Plan& plan, const Tokenizer& tokenizer) {
  size_t width = 10;
  for (const PlanSpan& span : plan.spans) {
    width = std::max(width, RowName(plan, span).size());
  }
  const int columns = static_cast<int>(std::min<size_t>(width, 40));
  std::string out =
      absl::StrFormat("%-6s  %-*s  %11s  %6s  %s\n", "kind", columns, "module",
                      "positions", "tokens", "text");
  for (const PlanSpan& span : plan.spans) {
    const std::string positions = absl::StrFormat(
        "%d-%d", span.start, span.start + span.num_tokens() - 1);
    absl::StrAppendFormat(&out, "%-6s  %-*s  %11s  %6d  %s",
                          ToAbsl(KindName(span.kind)), columns,
                          RowName(plan, span), positions, span.num_tokens(),
                          Excerpt(span, tokenizer));
    const std::string scaffold = ScaffoldOf(plan, span);
    if (!scaffold.empty()) {
      absl::StrAppendFormat(&out, "  [scaffold %s]", scaffold);
    }
    out += '\n';
  }
  absl::StrAppendFormat(
      &out, "%d tokens: %d in modules, %d fresh; next position %d; %s\n",
      plan.num_tokens, plan.num_cached_tokens,
      plan.num_tokens - plan.num_cached_tokens, plan.next_position,
      ToAbsl(ExactnessName(plan.exactness)));
  for (const std::string& warning : PlanBorders(plan, tokenizer)) {
    absl::StrAppendFormat(&out, "warning: %s\n", warning);
  }
  return out;
}

}  // namespace promptcache::pml
