#include "common/program_usage.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <vector>

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace promptcache {
namespace {

// While absl parses, which ends the program itself: with 1 for --help as for
// wrong flags.
struct Parsing {
  bool runs = false;
  bool help = false;
};

void AtExit(int status, void* parsing_of) {
  const Parsing& parsing = *static_cast<Parsing*>(parsing_of);
  if (!parsing.runs) return;
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(status == 0 || parsing.help ? 0 : 2);
}

// Of absl's flags that print help.
bool IsHelp(std::string_view argument) {
  argument = argument.substr(0, argument.find('='));
  const size_t dashes = argument.starts_with("--") ? 2 : 1;
  if (!argument.starts_with("-")) return false;
  for (const std::string_view name : {"help", "helpfull", "helpshort",
                                      "helppackage", "helpon", "helpmatch"}) {
    if (argument.substr(dashes) == name) return true;
  }
  return false;
}

}  // namespace

void ParseCommandLine(int argc, char** argv, const std::string& name,
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
  static Parsing parsing;  // for what runs at the program's end
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    if (IsHelp(argument)) parsing.help = true;
  }
  ::on_exit(AtExit, &parsing);
  parsing.runs = true;
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  parsing.runs = false;
  if (rest.size() == 1) return;
  // As absl words what it finds.
  std::cerr << "ERROR: Unexpected argument '" << rest[1] << "'\n";
  std::exit(2);
}

}  // namespace promptcache
