#include "tools/cli/placement_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tools/cli/proto_json.h"

namespace promptcache::cli {

std::string ShortUuid(const std::string& uuid) {
  return uuid.substr(0, uuid.find('-', uuid.find('-') + 1));
}

std::string TierText(v1::Tier tier, const std::string& device_uuid) {
  const std::string name = EnumWord(v1::Tier_descriptor(), tier);
  if (tier != v1::TIER_DEVICE || device_uuid.empty()) return name;
  return absl::StrCat(name, " ", ShortUuid(device_uuid));
}

std::string PlacementText(const v1::Module& module) {
  // Not resident, or an older daemon.
  if (module.placements().empty()) return TierText(module.tier(), "");
  return absl::StrJoin(
      module.placements(), ", ", [](std::string* out, const auto& placement) {
        out->append(TierText(placement.tier(), placement.device_uuid()));
      });
}

}  // namespace promptcache::cli
