#pragma once

#include <string>

namespace promptcache {

// What --help and --version of a server with absl's flags print; to be called
// before they are parsed. --help lists the flags of files named main.cc, after
// "NAME: " and `message`, and exits with 0 (absl alone: 1).
void SetProgramUsage(int argc, char** argv, const std::string& name,
                     const std::string& message);

}  // namespace promptcache
