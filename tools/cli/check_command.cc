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
};

int Check(const Globals& globals, const CheckFlags& flags) {
  CheckRunner runner(flags.model);
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
  if (globals.json) {
    std::cout << Json{{"passed", passed},
                      {"failed", failed},
                      {"failures", failures}}
                     .dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  } else {
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
                      "the model for the others: a GGUF file, of which a "
                      "vocabulary will do for tokenizers and PML (the small "
                      "model that tools/fetch_model fetched otherwise)");
  command->callback([=] { *action = [=] { return Check(*globals, *flags); }; });
}

}  // namespace promptcache::cli
