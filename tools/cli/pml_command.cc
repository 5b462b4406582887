#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/chat_template.h"
#include "common/pml/compiler.h"
#include "common/pml/error.h"
#include "common/pml/limits.h"
#include "common/pml/plan_json.h"
#include "common/pml/prompt.h"
#include "common/pml/schema.h"
#include "common/status_macros.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/files.h"
#include "tools/cli/local_model.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

struct CheckFlags {
  std::string schema;
  std::string prompt;
  std::string model;
  std::string chat_template;
  std::string layout = "compact";
  int32_t context_tokens = -1;  // the model's
  pml::Limits limits;
};

// A document that is refused: what was asked about failed.
int ReportPml(const absl::Status& status, const CheckFlags& flags, bool json) {
  const auto error = pml::PmlErrorOf(status);
  if (!error.has_value()) return Report(status, json);
  if (json) {
    std::cout << pml::ErrorToJson(*error) << "\n";
    return kExitFailed;
  }
  std::string place =
      error->source == pml::Source::kSchema ? flags.schema : flags.prompt;
  if (error->place.line > 0) absl::StrAppend(&place, ":", error->place.line);
  if (error->place.column > 0) {
    absl::StrAppend(&place, ":", error->place.column);
  }
  std::cout << place << ": " << error->reason << ": " << error->detail << "\n";
  return kExitFailed;
}

void PrintSchema(const pml::Schema& schema, bool json) {
  if (json) {
    Json modules = Json::array();
    for (const auto& module : schema.Modules()) {
      modules.push_back({{"module", module.path},
                         {"tokens", module.num_tokens},
                         {"cached", module.cached}});
    }
    std::cout << Json{{"schema", schema.name()},
                      {"modules", modules},
                      {"warnings", schema.BorderWarnings()}}
                     .dump()
              << "\n";
    return;
  }
  std::vector<std::vector<std::string>> rows{{"module", "tokens", ""}};
  for (const auto& module : schema.Modules()) {
    rows.push_back({module.path.empty() ? "(preamble)" : module.path,
                    WithCommas(static_cast<uint64_t>(module.num_tokens)),
                    module.cached ? "" : "not cached"});
  }
  std::cout << "schema " << schema.name() << ": fine\n"
            << FormatTable(rows, "  ");
  for (const auto& warning : schema.BorderWarnings()) {
    std::cout << "note: " << warning << "\n";
  }
}

absl::Status CheckPrompt(const CheckFlags& flags, const LocalVocabulary& model,
                         const pml::Schema& schema, bool json) {
  PC_ASSIGN_OR_RETURN(std::string text, ReadFile(flags.prompt));
  PC_ASSIGN_OR_RETURN(auto prompt, pml::ParsePrompt(text, flags.limits));
  pml::CompileOptions options;
  options.layout =
      flags.layout == "schema" ? pml::Layout::kSchema : pml::Layout::kCompact;
  options.context_length =
      flags.context_tokens >= 0 ? flags.context_tokens : model.context_length;
  PC_ASSIGN_OR_RETURN(pml::Plan plan, pml::Compile(schema, *prompt, options));
  std::cout << (json ? pml::PlanToJson(plan, *model.tokenizer) + "\n"
                     : pml::PlanToTable(plan, *model.tokenizer));
  return absl::OkStatus();
}

int Check(const Globals& globals, const CheckFlags& flags) {
  auto text = ReadFile(flags.schema);
  if (!text.ok()) return Report(text.status(), globals.json);
  auto model = LoadVocabulary(flags.model, flags.chat_template);
  if (!model.ok()) return Report(model.status(), globals.json);
  auto schema = pml::CompileSchema(*text, *model->tokenizer,
                                   model->chat_template, flags.limits);
  if (!schema.ok()) return ReportPml(schema.status(), flags, globals.json);
  if (flags.prompt.empty()) {
    PrintSchema(**schema, globals.json);
    return kExitOk;
  }
  const absl::Status status =
      CheckPrompt(flags, *model, **schema, globals.json);
  return status.ok() ? kExitOk : ReportPml(status, flags, globals.json);
}

// The worker's flags of the same names.
void AddLimits(CLI::App* command, pml::Limits* limits) {
  const auto add = [&](const char* name, int64_t* value, const char* what) {
    return command->add_option(name, *value, what)
        ->check(CLI::PositiveNumber)
        ->capture_default_str()
        ->group("Limits");
  };
  add("--max-schema-bytes", &limits->schema_bytes, "longest schema")
      ->transform(CLI::AsSizeValue(false));
  add("--max-prompt-bytes", &limits->prompt_bytes, "longest prompt")
      ->transform(CLI::AsSizeValue(false));
  add("--max-depth", &limits->depth, "elements inside one another");
  add("--max-modules", &limits->modules, "modules of a schema");
  add("--max-name-chars", &limits->name_chars, "longest name");
}

}  // namespace

void AddPml(CLI::App* app, const Globals* globals, Action* action) {
  CLI::App* pml = app->add_subcommand(
      "pml", "the prompt markup language: check documents without a server");
  pml->require_subcommand(1);
  pml->fallthrough();
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* check = pml->add_subcommand(
      "check",
      "print the plan that a prompt compiles to, or what is wrong with it; "
      "without a prompt, judge the schema alone");
  check->add_option("--schema", flags->schema, "a file with the schema")
      ->required();
  check->add_option("prompt", flags->prompt,
                    "a file with the prompt; - is standard input");
  check->add_option("--model", flags->model,
                    "whose tokenizer and chat template: a GGUF file or a "
                    "Hugging Face folder (the small model that "
                    "tools/fetch_model fetched otherwise)");
  check->add_option("--template", flags->chat_template,
                    ChatTemplate::KnownNames() + "; the model's own otherwise");
  check->add_option("--layout", flags->layout, "compact or schema")
      ->check(CLI::IsMember({"compact", "schema"}))
      ->capture_default_str();
  check
      ->add_option("--context", flags->context_tokens,
                   "length of the context in tokens; the model's otherwise")
      ->check(CLI::NonNegativeNumber);
  AddLimits(check, &flags->limits);
  check->callback([=] { *action = [=] { return Check(*globals, *flags); }; });
}

}  // namespace promptcache::cli
