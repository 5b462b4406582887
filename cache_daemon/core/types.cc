#include "cache_daemon/core/types.h"

namespace promptcache::daemon {

std::string_view MissReasonName(MissReason reason) {
  switch (reason) {
    case MissReason::kNone:
      return "none";
    case MissReason::kNeverSeen:
      return "never seen";
    case MissReason::kEvicted:
      return "evicted";
    case MissReason::kExpired:
      return "expired";
    case MissReason::kIdentityDiffers:
      return "identity differs";
    case MissReason::kNotYetCommitted:
      return "not yet committed";
    case MissReason::kNoMemory:
      return "no memory";
    case MissReason::kNotResident:
      return "not resident";
    case MissReason::kCorrupt:
      return "corrupt";
    case MissReason::kOnOtherDevice:
      return "on another device";
  }
  return "";
}

std::string_view ModuleStateName(ModuleState state) {
  switch (state) {
    case ModuleState::kNone:
      return "absent";
    case ModuleState::kReserved:
      return "reserved";
    case ModuleState::kCommitted:
      return "committed";
    case ModuleState::kMoving:
      return "moving";
    case ModuleState::kEvicted:
      return "evicted";
    case ModuleState::kQuarantined:
      return "quarantined";
  }
  return "";
}

std::string_view TierName(Tier tier) {
  switch (tier) {
    case Tier::kNone:
      return "none";
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
  }
  return "";
}

}  // namespace promptcache::daemon
