#pragma once

#include <string>

namespace promptcache {

// Where the programs of one user meet when nobody says otherwise.

// ${XDG_RUNTIME_DIR:-/tmp}/promptcache/daemon.sock
std::string DefaultDaemonSocket();
// ${XDG_STATE_HOME:-~/.local/state}/promptcache/registry.db; below the
// temporary folder for who has no home.
std::string DefaultRegistryPath();
// ${XDG_CACHE_HOME:-~/.cache}/promptcache/fingerprints; "" for who has no home.
std::string DefaultFingerprintCache();

}  // namespace promptcache
