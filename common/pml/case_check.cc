#include "common/pml/case_check.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/pml/compiler.h"
#include "common/pml/error.h"
#include "common/pml/plan_json.h"
#include "common/status_macros.h"

namespace promptcache::pml {
namespace {

using nlohmann::json;

absl::StatusOr<Plan> CompileCase(const json& c, const Tokenizer& tokenizer,
                                 const ChatTemplate& chat_template) {
  PC_ASSIGN_OR_RETURN(const std::shared_ptr<const Schema> schema,
                      CompileSchema(c.at("schema").get<std::string>(),
                                    tokenizer, chat_template));
  PC_ASSIGN_OR_RETURN(const std::shared_ptr<const Prompt> prompt,
                      ParsePrompt(c.at("prompt").get<std::string>()));
  CompileOptions options;
  const std::string layout = c.value("layout", "compact");
  if (layout != "compact" && layout != "schema") {
    return absl::InvalidArgumentError(absl::StrCat("layout ", layout));
  }
  if (layout == "schema") options.layout = Layout::kSchema;
  options.context_length = c.value("context", 8192);
  return Compile(*schema, *prompt, options);
}

std::string Difference(std::string_view what, const json& expected,
                       const json& actual) {
  std::string out(what);
  absl::StrAppend(&out, ": expected ", expected.dump(), ", is ", actual.dump());
  return out;
}

// The first of the fields of `expected` that `actual` has otherwise.
std::string FirstDifference(const std::string& where, const json& expected,
                            const json& actual) {
  for (const auto& [key, value] : expected.items()) {
    if (key == "spans") continue;
    const json found = actual.value(key, json());
    if (found != value) return Difference(where + key, value, found);
  }
  return "";
}

std::string CompareSpans(const json& expected, const json& actual) {
  for (size_t i = 0; i < std::min(expected.size(), actual.size()); ++i) {
    const std::string where = absl::StrCat("span ", i, ", ");
    std::string difference = FirstDifference(where, expected[i], actual[i]);
    if (difference.empty() && actual[i].size() != expected[i].size()) {
      difference = Difference(where + "all of it", expected[i], actual[i]);
    }
    if (!difference.empty()) return difference;
  }
  if (expected.size() == actual.size()) return "";
  return Difference("number of spans", expected.size(), actual.size());
}

std::string Compare(const json& expected, const absl::StatusOr<Plan>& plan) {
  if (!plan.ok()) {
    const std::optional<PmlError> error = PmlErrorOf(plan.status());
    if (!error.has_value()) return std::string(plan.status().message());
    if (!expected.contains("error")) {
      return absl::StrCat("expected a plan, is ", plan.status().message());
    }
    const json actual = json::parse(ErrorToJson(*error));
    return FirstDifference("error, ", expected["error"], actual["error"]);
  }
  const json actual = json::parse(PlanToJson(*plan));
  if (expected.contains("error")) {
    return Difference("error", expected["error"], actual);
  }
  const std::string spans =
      CompareSpans(expected.at("spans"), actual.at("spans"));
  return spans.empty() ? FirstDifference("", expected, actual) : spans;
}

}  // namespace

absl::StatusOr<std::vector<CaseResult>> CheckPmlCases(
    std::string_view json_text, const Tokenizer& tokenizer) {
  // The only exceptions here are nlohmann-json's, of a file in another form.
  try {
    const json file = json::parse(json_text);
    PC_ASSIGN_OR_RETURN(
        const ChatTemplate chat_template,
        ChatTemplate::FromName(file.at("template").get<std::string>()));
    std::vector<CaseResult> results;
    for (const json& c : file.at("cases")) {
      results.push_back(
          {.name = c.at("name").get<std::string>(),
           .difference = Compare(c.at("expect"),
                                 CompileCase(c, tokenizer, chat_template))});
    }
    return results;
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(
        absl::StrCat("not a file of PML cases: ", e.what()));
  }
}

}  // namespace promptcache::pml
