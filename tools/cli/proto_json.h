#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json_fwd.hpp>

namespace promptcache::cli {

// A message as JSON for scripts: field names as in the proto, every number a
// number (protobuf's own writer makes strings of 64-bit ones), enumerators in
// lower case without their prefix ("committed"), times in RFC 3339, durations
// in seconds. Fields with a default value are written, unset messages are not.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

// "MODULE_STATE_COMMITTED" of that enum -> "committed"; UNSPECIFIED -> "".
std::string EnumWord(const google::protobuf::EnumDescriptor* type, int value);

}  // namespace promptcache::cli
