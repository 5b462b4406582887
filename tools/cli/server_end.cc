#include "tools/cli/server_end.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace promptcache::cli {
namespace {

constexpr int kLinesOfLog = 12;

// What a server says last that ends by itself; "" when it says no such thing.
std::string ReasonIn(const std::string& log, const std::string& name) {
  const std::string prefix = absl::StrCat("\npromptcache-", name, ": ");
  const std::string text = "\n" + log;
  const size_t at = text.rfind(prefix);
  if (at == std::string::npos) return "";
  return std::string(
      absl::StripAsciiWhitespace(text.substr(at + prefix.size())));
}

// What absl says of the flags before the program has said anything.
std::string FlagErrorsIn(const std::string& log) {
  std::vector<absl::string_view> errors;
  for (absl::string_view line : absl::StrSplit(log, '\n')) {
    if (absl::ConsumePrefix(&line, "ERROR: ")) errors.push_back(line);
  }
  return absl::StrJoin(errors, "; ");
}

}  // namespace

std::string LastLines(const std::string& text, int lines) {
  size_t begin = text.size();
  for (int i = 0; i <= lines && begin != std::string::npos && begin > 0; ++i) {
    begin = text.rfind('\n', begin - 1);
  }
  return begin == std::string::npos || begin == 0 ? text
                                                  : text.substr(begin + 1);
}

std::string WhyEnded(const std::string& name, const std::string& ended,
                     const std::string& log, const std::string& log_path) {
  if (absl::StartsWith(ended, "signal ")) {
    const std::string killed =
        absl::StrCat("the ", name, " was killed by ", ended);
    // Those that come from outside leave no word.
    for (const char* outside :
         {"signal 1", "signal 2", "signal 9", "signal 15"}) {
      if (ended == outside)
        return absl::StrCat(killed, " (log ", log_path, ")");
    }
    return absl::StrCat(killed, "; its log ", log_path, " ends:\n",
                        LastLines(log, kLinesOfLog));
  }
  std::string reason = ReasonIn(log, name);
  if (reason.empty()) reason = FlagErrorsIn(log);
  if (!reason.empty()) {
    return absl::StrCat("the ", name, " ended: ", reason, " (log ", log_path,
                        ")");
  }
  return absl::StrCat("the ", name, " ended (", ended, "); its log ", log_path,
                      " ends:\n", LastLines(log, kLinesOfLog));
}

}  // namespace promptcache::cli
