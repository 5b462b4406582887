#pragma once

namespace promptcache {

// A named moment at which a test has the process killed or stopped. Does
// nothing in programs; in those that tests build for it (build/bin/emulated),
// PROMPTCACHE_FAULT=NAME:kill raises SIGKILL here and NAME:stop SIGSTOP.
// Which of the two a program gets is decided by what it links.
void FaultPoint(const char* name);

}  // namespace promptcache
