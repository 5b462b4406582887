#include "common/program_usage.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace promptcache {
namespace {

[[noreturn]] void EndFine() {
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(0);
}

}  // namespace

void SetProgramUsage(int argc, char** argv, const std::string& name,
                     const std::string& message) {
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "main.cc");
  };
  usage.version_string = [name] {
    return absl::StrCat(name, " " PROMPTCACHE_VERSION "\n");
  };
  absl::SetFlagsUsageConfig(usage);
  absl::SetProgramUsageMessage(message);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    if (argument == "--help" || argument == "-help") {
      // Absl ends the program from within its parser.
      std::atexit([] { EndFine(); });
      break;
    }
  }
}

}  // namespace promptcache
