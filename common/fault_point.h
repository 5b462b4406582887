#pragma once

namespace promptcache {

// A named moment at which a test has the process killed or stopped. Does
// nothing in programs; in those that tests build for it (build/bin/emulated),
// PROMPTCACHE_FAULT=NAME:kill raises SIGKILL here and NAME:stop SIGSTOP, once
// there is the file that PROMPTCACHE_FAULT_FILE names, if it names one;
// NAME:touch, in another process, makes that file.
// Which of the two a program gets is decided by what it links.
void FaultPoint(const char* name);

}  // namespace promptcache
