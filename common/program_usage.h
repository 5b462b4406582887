#pragma once

#include <string>

namespace promptcache {

// Parses the command line of a server with absl's flags. --help lists the flags
// of files named main.cc, after "NAME: " and `message`, and ends the program
// with status 0 (absl alone: 1), as --version does. A wrong command line, an
// argument that is no flag included, is told on standard error and ends it with
// status 2 (absl alone: 1).
void ParseCommandLine(int argc, char** argv, const std::string& name,
                      const std::string& message);

}  // namespace promptcache
