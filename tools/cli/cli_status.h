#pragma once

#include <string>

#include "absl/status/status.h"

namespace promptcache::cli {

// What `promptcache` exits with; part of its interface.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,         // the thing asked about failed; a local file is bad
  kExitUsage = 2,          // the command line cannot be understood
  kExitUnreachable = 3,    // no server answers at the address
  kExitRefused = 4,        // a server answered with an error
  kExitInterrupted = 130,  // Ctrl-C, as shells say it
};

// The exit code rides on a status as a payload.
absl::Status WithExitCode(absl::Status status, ExitCode code);
// kExitFailed unless one was attached.
ExitCode ExitCodeOf(const absl::Status& status);

// Says that the document `source` ("schema", "prompt") was read from `file`, so
// that faults in it are reported by its name. "" and "-" are no file's.
absl::Status NamingFile(absl::Status status, const std::string& source,
                        const std::string& file);

absl::Status UsageError(const std::string& message);

// Says `status` on standard error, its details in words (line and column of a
// PML fault, fields, when to retry), and with `json` as an object {"error":
// ...} on standard output too. Returns the exit code.
int Report(const absl::Status& status, bool json);

}  // namespace promptcache::cli
