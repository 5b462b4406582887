#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "tools/cli/app.h"
#include "tools/cli/check_runner.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

using Json = nlohmann::ordered_json;

struct CheckFlags {
  std::vector<std::string> paths;
  std::string model;
  std::string numerics = "exact";
  std::string device = "cpu";
};

Json ToJson(const worker::LogitErrors& errors) {
  return {{"choices", errors.num_choices},
          {"other_choices", errors.num_other_choices},
          {"max_margin_of_other_choice", errors.max_margin_of_other},
          {"max_mean_nll", errors.max_mean_nll},
          {"max_nll", errors.max_nll},
          {"max_logit", errors.max_logit},
          {"max_logsumexp", errors.max_logsumexp}};
}

int Check(const Globals& globals, const CheckFlags& flags) {
  CheckRunner runner(flags.model,
                     flags.numerics == "fast" ? worker::Numerics::kFast
                                              : worker::Numerics::kExact,
                     flags.device);
  Json failures = Json::array();
  size_t passed = 0, failed = 0;
  ProgressBar bar("checking");
  runner.Run(
      flags.paths, [&](const std::string& file) { bar.Update(-1, file); },
      [&](const std::string& file, const CaseResult& result) {
        if (result.difference.empty()) {
          ++passed;
          return;
        }
        ++failed;
        if (globals.json) {
          failures.push_back({{"file", file},
                              {"case", result.name},
                              {"difference", result.difference}});
        } else {
          std::cout << file << ": " << result.name << ": " << result.difference
                    << "\n";
        }
      });
  const worker::LogitErrors& errors = runner.logit_errors();
  if (globals.json) {
    Json json = {
        {"passed", passed}, {"failed", failed}, {"failures", failures}};
    if (errors.num_choices > 0) json["logit_errors"] = ToJson(errors);
    std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  } else {
    if (errors.num_choices > 0) {
      std::cout << errors.num_other_choices << " of " << errors.num_choices
                << " choices differ, the worst with a margin of "
                << errors.max_margin_of_other << "; worst mean nll "
                << errors.max_mean_nll << ", logit " << errors.max_logit
                << "\n";
    }
    std::cout << passed << " passed, " << failed << " failed\n";
  }
  return failed == 0 ? kExitOk : kExitFailed;
}

}  // namespace

void AddCheck(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* command = app->add_subcommand(
      "check",
      "run files of vectors (values that other implementations computed) "
      "against this build, without a server; prints one line per case that "
      "fails, then `N passed, N failed`");
  command
      ->add_option("paths", flags->paths,
                   "files, or folders: all vector files below, recognised by "
                   "their fields. A folder with a model in it is checked with "
                   "that model")
      ->required();
  command->add_option("--model", flags->model,
                      "the model for the others: a GGUF file or a Hugging Face "
                      "folder, of which a vocabulary will do for tokenizers "
                      "and PML (the small model that tools/fetch_model fetched "
                      "otherwise)");
  command
      ->add_option("--numerics", flags->numerics,
                   "exact, for which the limits are meant, or fast: how far "
                   "8-bit activations are from the same values")
      ->check(CLI::IsMember({"exact", "fast"}))
      ->capture_default_str();
  command
      ->add_option("--device", flags->device,
                   "where models run: cpu, cuda, a GPU by its UUID, or auto")
      ->capture_default_str();
  command->callback([=] { *action = [=] { return Check(*globals, *flags); }; });
}

}  // namespace promptcache::cli
