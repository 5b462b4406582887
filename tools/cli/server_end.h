#pragma once

#include <string>

namespace promptcache::cli {

// The last `lines` lines of it.
std::string LastLines(const std::string& text, int lines);

// Why the server `name` ("daemon") ended, from how it did ("exit status 1",
// "signal 9") and from what it wrote since it was started: the signal that
// killed it, else the reason that it gave at last ("promptcache-daemon:
// REASON"), else what was wrong with its flags, else the end of the log.
std::string WhyEnded(const std::string& name, const std::string& ended,
                     const std::string& log, const std::string& log_path);

}  // namespace promptcache::cli
