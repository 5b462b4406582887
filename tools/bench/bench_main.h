#pragma once

#include <functional>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"

namespace promptcache::bench {

// The end of every benchmark's main: reads the options that `app` has, runs,
// and returns the exit status. Standard error gets warnings and what failed.
int BenchMain(int argc, char** argv, CLI::App& app,
              const std::function<absl::Status()>& run);

}  // namespace promptcache::bench
