#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tools/cli/client.h"

namespace promptcache::cli {

// What every command may be told.
struct Globals {
  bool json = false;
  std::string worker = "127.0.0.1:7070";
  std::string daemon = "127.0.0.1:7071";
  double connect_timeout_s = 3;

  absl::StatusOr<std::unique_ptr<WorkerClient>> ConnectWorker() const {
    return WorkerClient::Connect(worker, absl::Seconds(connect_timeout_s));
  }
  absl::StatusOr<std::unique_ptr<DaemonClient>> ConnectDaemon() const {
    return DaemonClient::Connect(daemon, absl::Seconds(connect_timeout_s));
  }
};

// The command that was chosen; set while the command line is parsed, run after.
// Returns the exit code.
using Action = std::function<int()>;

// Each adds its command, with its own options kept alive by the closures of
// `app`. `globals` and `action` must outlive `app`.
void AddDemo(CLI::App* app, const Globals* globals, Action* action);
void AddUp(CLI::App* app, const Globals* globals, Action* action);
void AddSchema(CLI::App* app, const Globals* globals, Action* action);
void AddGenerate(CLI::App* app, const Globals* globals, Action* action);
void AddCount(CLI::App* app, const Globals* globals, Action* action);
void AddWarm(CLI::App* app, const Globals* globals, Action* action);
void AddCache(CLI::App* app, const Globals* globals, Action* action);
void AddPml(CLI::App* app, const Globals* globals, Action* action);
void AddCheck(CLI::App* app, const Globals* globals, Action* action);
void AddVerify(CLI::App* app, const Globals* globals, Action* action);
void AddModel(CLI::App* app, const Globals* globals, Action* action);

}  // namespace promptcache::cli
