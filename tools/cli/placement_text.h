#pragma once

#include <string>

#include "promptcache/v1/cache.pb.h"

namespace promptcache::cli {

// "GPU-1b2c3d4e": enough of a UUID to be recognised in a table.
std::string ShortUuid(const std::string& uuid);

// "device GPU-1b2c3d4e", "device", "host"; where the tier is no GPU's, its name
// alone.
std::string TierText(v1::Tier tier, const std::string& device_uuid);

// Where the copies of a module are, with commas between.
std::string PlacementText(const v1::Module& module);

}  // namespace promptcache::cli
