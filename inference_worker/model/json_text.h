#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/status/statusor.h"

namespace promptcache::worker {

// Parses a whole JSON text whose value is an object. InvalidArgument for what
// is not JSON, an object with a key twice, or nesting deeper than 32.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text);

// A value as it may stand in a message: shortened.
std::string DescribeJson(const nlohmann::json& value);

}  // namespace promptcache::worker
