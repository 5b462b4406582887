#include "tools/cli/demo_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

// Upper case, as everywhere in the documents.
std::string ExactnessWord(v1::Exactness exactness) {
  return exactness == v1::EXACTNESS_EXACT     ? "EXACT"
         : exactness == v1::EXACTNESS_MODULAR ? "MODULAR"
                                              : "UNKNOWN";
}

std::string Meaning(v1::Exactness exactness) {
  if (exactness == v1::EXACTNESS_EXACT) {
    return "EXACT: every cached token saw exactly the tokens that stand before "
           "it in this prompt, so the result equals full attention over the "
           "same tokens, but for rounding.";
  }
  return "MODULAR: the documents were encoded without seeing each other, so "
         "that any prompt can use them in any order; the answer may differ "
         "from full attention's. With and without the cache it is the same, "
         "bit for bit.";
}

double Speedup(const DemoPrompt& prompt) {
  const double cached = prompt.ttft_cached_ms();
  return cached > 0 ? prompt.ttft_full_ms() / cached : 0;
}

Json AnswerJson(const DemoAnswer& answer) {
  const v1::Usage& usage = answer.completed.usage();
  return {{"mode", answer.mode.key},
          {"ttft_ms", answer.ttft_ms},
          {"server_ttft_ms", answer.completed.timings().ttft_ms()},
          {"prompt_tokens", usage.prompt_tokens()},
          {"cached_tokens", usage.cached_tokens()},
          {"created_tokens", usage.created_tokens()},
          {"fresh_tokens", usage.fresh_tokens()},
          {"completion_tokens", usage.completion_tokens()},
          {"finish_reason", EnumWord(v1::FinishReason_descriptor(),
                                     answer.completed.finish_reason())},
          {"text", answer.text},
          {"notices", ToJson(answer.completed)["notices"]}};
}

// The figures of one prompt's comparison, at the top level and for each.
Json Figures(const DemoPrompt& prompt) {
  return {{"ttft_full_ms", prompt.ttft_full_ms()},
          {"ttft_cached_ms", prompt.ttft_cached_ms()},
          {"speedup", Speedup(prompt)},
          {"cached_tokens", prompt.cached().completed.usage().cached_tokens()},
          {"created_tokens", prompt.first().completed.usage().created_tokens()},
          {"fresh_tokens", prompt.cached().completed.usage().fresh_tokens()},
          {"answers_agree", prompt.answers_agree()},
          {"full_answer_agrees", prompt.full().text == prompt.cached().text},
          {"exactness", ExactnessWord(prompt.cached().completed.exactness())}};
}

}  // namespace

std::string DemoTable(const DemoPrompt& prompt) {
  std::vector<std::vector<std::string>> rows{{"", "first token", "from cache",
                                              "created", "fresh",
                                              "same answer as no cache"}};
  for (const DemoAnswer& answer : prompt.answers) {
    const v1::Usage& usage = answer.completed.usage();
    rows.push_back({answer.mode.name, HumanMs(answer.ttft_ms),
                    WithCommas(usage.cached_tokens()),
                    WithCommas(usage.created_tokens()),
                    WithCommas(usage.fresh_tokens()),
                    &answer == &prompt.bypass()           ? ""
                    : answer.text == prompt.bypass().text ? "yes"
                                                          : "no"});
  }
  std::string out = FormatTable(rows, "  ");
  absl::StrAppendFormat(
      &out,
      "\n  Median of %d: full attention %s, cached %s: %.1f times faster.\n",
      prompt.full_ms.size(), HumanMs(prompt.ttft_full_ms()),
      HumanMs(prompt.ttft_cached_ms()), Speedup(prompt));
  absl::StrAppend(&out,
                  Wrap(Meaning(prompt.cached().completed.exactness()), "  "));
  for (const DemoAnswer& answer : prompt.answers) {
    for (const auto& notice : answer.completed.notices()) {
      absl::StrAppend(&out, "  note (", answer.mode.name, "): ", notice, "\n");
    }
  }
  return out;
}

std::string DemoSummary(const std::vector<DemoPrompt>& prompts) {
  std::vector<std::vector<std::string>> rows{
      {"prompt", "exactness", "full attention", "cached", "faster",
       "from cache", "fresh", "answers agree"}};
  for (const DemoPrompt& prompt : prompts) {
    const v1::Usage& usage = prompt.cached().completed.usage();
    rows.push_back(
        {prompt.name, ExactnessWord(prompt.cached().completed.exactness()),
         HumanMs(prompt.ttft_full_ms()), HumanMs(prompt.ttft_cached_ms()),
         absl::StrFormat("%.1fx", Speedup(prompt)),
         WithCommas(usage.cached_tokens()), WithCommas(usage.fresh_tokens()),
         prompt.answers_agree() ? "yes" : "NO"});
  }
  return FormatTable(rows, "");
}

std::vector<std::string> DemoFaults(const std::vector<DemoPrompt>& prompts) {
  std::vector<std::string> faults;
  for (const DemoPrompt& prompt : prompts) {
    if (prompt.least_cached_tokens == 0) {
      faults.push_back(absl::StrCat(
          prompt.name, ": a run over the cache read nothing from it"));
      for (const auto& notice : prompt.cached().completed.notices()) {
        absl::StrAppend(&faults.back(), "; the worker says: ", notice);
      }
    }
    if (!prompt.answers_agree()) {
      faults.push_back(absl::StrCat(
          prompt.name, ": the answers with and without the cache differ"));
    }
  }
  return faults;
}

Json DemoJson(const std::vector<DemoPrompt>& prompts,
              const v1::ModelInfo& model) {
  Json json = Figures(prompts[0]);
  json["repeats"] = prompts[0].full_ms.size();
  json["model"] = model.name();
  json["kernels"] = model.kernels();
  json["numerics"] = model.numerics();
  json["num_threads"] = model.num_threads();
  for (const DemoPrompt& prompt : prompts) {
    Json one{{"name", prompt.key}, {"question", prompt.question}};
    one.update(Figures(prompt));
    one["ttft_full_ms_each"] = prompt.full_ms;
    one["ttft_cached_ms_each"] = prompt.cached_ms;
    for (const DemoAnswer& answer : prompt.answers) {
      one["answers"].push_back(AnswerJson(answer));
    }
    json["prompts"].push_back(one);
  }
  return json;
}

}  // namespace promptcache::cli
