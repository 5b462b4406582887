#include "common/fault_point.h"

#include <csignal>
#include <cstdlib>
#include <string>

namespace promptcache {

void FaultPoint(const char* name) {
  const char* const wanted = std::getenv("PROMPTCACHE_FAULT");
  if (wanted == nullptr) return;
  if (wanted == std::string(name) + ":kill") std::raise(SIGKILL);
  if (wanted == std::string(name) + ":stop") std::raise(SIGSTOP);
}

}  // namespace promptcache
