#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/policy_flags.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"
#include "tools/cli/warm.h"

namespace promptcache::cli {

absl::StatusOr<v1::WarmModulesResponse> WarmWithProgress(
    WorkerClient* worker, const v1::WarmModulesRequest& request) {
  ProgressBar bar("encoding " + request.schema());
  v1::WarmModulesResponse last;
  const absl::Status status = worker->WarmModules(
      request, [&](const v1::WarmModulesResponse& progress) {
        last.MergeFrom(progress);
        const double total = static_cast<double>(progress.tokens_total());
        bar.Update(
            total == 0 ? 1
                       : static_cast<double>(progress.tokens_done()) / total,
            absl::StrCat(progress.modules_done(), "/", progress.modules_total(),
                         " ", progress.path()));
      });
  if (!status.ok()) return status;
  return last;
}

namespace {

struct WarmFlags {
  std::string schema;
  std::vector<std::string> paths;
  PolicyFlags policy;
};

int Warm(const Globals& globals, const WarmFlags& flags) {
  v1::WarmModulesRequest request;
  request.set_schema(flags.schema);
  for (const std::string& path : flags.paths) request.add_paths(path);
  if (flags.policy.given()) {
    auto policy = flags.policy.Policy();
    if (!policy.ok()) return Report(policy.status(), globals.json);
    *request.mutable_policy() = *policy;
  }
  auto worker = globals.ConnectWorker();
  if (!worker.ok()) return Report(worker.status(), globals.json);
  auto last = WarmWithProgress(worker->get(), request);
  if (!last.ok()) return Report(last.status(), globals.json);
  const int exit = last->not_kept() == 0 ? kExitOk : kExitFailed;
  if (globals.json) {
    std::cout << ToJson(*last).dump(2) << "\n";
    return exit;
  }
  std::cout << flags.schema << ": " << last->modules_done() << " of "
            << last->modules_total() << " modules, "
            << WithCommas(last->tokens_done()) << " tokens; "
            << last->already_cached() << " were in the cache already\n";
  for (const auto& notice : last->notices()) {
    std::cerr << "note: " << notice << "\n";
  }
  if (last->not_kept() > 0) {
    std::cerr << "promptcache warm: " << last->not_kept() << " of "
              << last->modules_total() << " modules are not in the cache\n";
  }
  return exit;
}

}  // namespace

void AddWarm(CLI::App* app, const Globals* globals, Action* action) {
  auto flags = std::make_shared<WarmFlags>();
  CLI::App* command = app->add_subcommand(
      "warm", "encode a schema's modules into the cache ahead of use");
  command->add_option("schema", flags->schema, "the schema's name")->required();
  command->add_option("paths", flags->paths,
                      "modules; all cached ones of the schema otherwise");
  flags->policy.AddTo(command);
  command->callback([=] { *action = [=] { return Warm(*globals, *flags); }; });
}

}  // namespace promptcache::cli
