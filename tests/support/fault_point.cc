#include "common/fault_point.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

namespace promptcache {

void FaultPoint(const char* name) {
  const char* const wanted = std::getenv("PROMPTCACHE_FAULT");
  if (wanted == nullptr) return;
  const std::string fault = wanted;
  if (fault.substr(0, fault.rfind(':')) != name) return;
  const char* const file = std::getenv("PROMPTCACHE_FAULT_FILE");
  if (fault.ends_with(":touch")) {
    if (file != nullptr) ::close(::open(file, O_CREAT | O_CLOEXEC, 0600));
    return;
  }
  while (file != nullptr && ::access(file, F_OK) != 0) ::usleep(1000);
  if (fault.ends_with(":kill")) std::raise(SIGKILL);
  if (fault.ends_with(":stop")) std::raise(SIGSTOP);
}

}  // namespace promptcache
