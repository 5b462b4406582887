#include "common/default_paths.h"

#include <cstdlib>

namespace promptcache {
namespace {

// "" when the variable is not set, or not absolute as the XDG rules demand.
std::string Folder(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || value[0] != '/') return "";
  return value;
}

}  // namespace

std::string DefaultDaemonSocket() {
  std::string folder = Folder("XDG_RUNTIME_DIR");
  if (folder.empty()) folder = "/tmp";
  return folder + "/promptcache/daemon.sock";
}

std::string DefaultRegistryPath() {
  std::string folder = Folder("XDG_STATE_HOME");
  if (folder.empty()) {
    const std::string home = Folder("HOME");
    folder = home.empty() ? "/tmp" : home + "/.local/state";
  }
  return folder + "/promptcache/registry.db";
}

std::string DefaultFingerprintCache() {
  std::string folder = Folder("XDG_CACHE_HOME");
  if (folder.empty()) {
    const std::string home = Folder("HOME");
    if (home.empty()) return "";
    folder = home + "/.cache";
  }
  return folder + "/promptcache/fingerprints";
}

}  // namespace promptcache
