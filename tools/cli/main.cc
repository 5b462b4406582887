#include <signal.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/match.h"
#include "common/rpc/endpoints.h"
#include "glog/logging.h"
#include "tools/cli/app.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/help_format.h"

namespace {

constexpr char kDescription[] =
    "promptcache: encode the parts of prompts that repeat once, and answer "
    "from "
    "memory.\n\n"
    "New here?  `promptcache demo` starts everything, answers two prompts with "
    "and\nwithout the cache, and shows what that saves.";

constexpr char kFooter[] =
    "\nServers:    `promptcache up` starts both on this machine. The worker "
    "answers\n            prompts (--worker), the daemon keeps the cache "
    "(--daemon).\n"
    "Exit codes: 0 fine; 1 what was asked about failed; 2 the command line is "
    "wrong;\n            3 no server answers; 4 the server refused, or what "
    "was named is\n            not there.";

// The command that was reached: "promptcache schema put".
std::string NameOf(const CLI::App& command) {
  return command.get_parent() == nullptr
             ? command.get_name()
             : NameOf(*command.get_parent()) + " " + command.get_name();
}

// What is wrong with the command line, and where help is.
std::string UsageFault(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
  }
  std::string fault = error.what();
  // CLI11 misses a subcommand before it looks at what it did not know.
  const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr &&
      command->get_require_subcommand_min() > 0) {
    fault = unknown.empty() ? "no command is given"
            : absl::StartsWith(unknown.front(), "-")
                ? "unknown option " + unknown.front()
                : "unknown command " + unknown.front();
  }
  while (!fault.empty() && fault.back() == '\n') fault.pop_back();
  return fault + "; see " + NameOf(*command) + " --help";
}

// For CLI11: empty when it is none.
std::string AddressFault(const std::string& address) {
  return std::string(promptcache::rpc::CheckAddress(address).message());
}

bool WantsJson(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](std::string_view argument) {
    return argument == "--json";
  });
}

}  // namespace

// CLI11 throws at names that no option may have, which would show at once.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  using namespace promptcache::cli;
  google::InitGoogleLogging(argv[0]);
  FLAGS_logtostderr = true;
  FLAGS_minloglevel = google::WARNING;
  // `promptcache events | head` ends quietly.
  ::signal(SIGPIPE, SIG_DFL);

  CLI::App app(kDescription, "promptcache");
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  app.set_version_flag("--version", "promptcache " PROMPTCACHE_VERSION);
  Globals globals;
  app.add_flag("--json", globals.json,
               "print results as JSON on standard output");
  app.add_option("--worker", globals.worker, "where the worker listens")
      ->check(AddressFault)
      ->capture_default_str();
  app.add_option("--daemon", globals.daemon, "where the daemon listens")
      ->check(AddressFault)
      ->capture_default_str();
  app.add_option("--connect-timeout", globals.connect_timeout_s,
                 "seconds to wait for a server to answer")
      ->capture_default_str();
  Action action;
  AddDemo(&app, &globals, &action);
  AddUp(&app, &globals, &action);
  AddSchema(&app, &globals, &action);
  AddGenerate(&app, &globals, &action);
  AddCount(&app, &globals, &action);
  AddWarm(&app, &globals, &action);
  AddCache(&app, &globals, &action);
  AddPml(&app, &globals, &action);
  AddCheck(&app, &globals, &action);
  AddVerify(&app, &globals, &action);
  AddModel(&app, &globals, &action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return Report(UsageError(UsageFault(app, e)), WantsJson(argc, argv));
  }
  return action();
}
