#pragma once

#include "tools/cli/app.h"

namespace promptcache::cli {

// The commands that ask the daemon; AddCache adds them all.
void AddStats(CLI::App* app, const Globals* globals, Action* action);
void AddModules(CLI::App* app, const Globals* globals, Action* action);
void AddEvict(CLI::App* app, const Globals* globals, Action* action);
void AddPin(CLI::App* app, const Globals* globals, Action* action);
void AddEvents(CLI::App* app, const Globals* globals, Action* action);

}  // namespace promptcache::cli
