#pragma once

#include "cache_daemon/core/requests.h"
#include "cache_daemon/registry/module_log.h"
#include "glog/logging.h"

namespace promptcache::daemon {

// Lets pins that a policy made or ended survive a restart.
inline void ApplyPins(const PolicyResult& result, ModuleLog* log) {
  for (const ModuleKey& key : result.pinned) log->SetPin(key, true);
  for (const ModuleKey& key : result.unpinned) log->SetPin(key, false);
  LOG_IF(WARNING, !result.pins_refused.empty())
      << result.pins_refused.size()
      << " modules were not pinned: the pin budget has no room for them";
}

}  // namespace promptcache::daemon
