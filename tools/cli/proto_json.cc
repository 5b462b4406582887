#include "tools/cli/proto_json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include <cctype>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/time/time.h"

namespace promptcache::cli {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

Json MessageValue(const Message& message) {
  if (message.GetDescriptor() == google::protobuf::Timestamp::descriptor()) {
    const auto& t = static_cast<const google::protobuf::Timestamp&>(message);
    return absl::FormatTime(
        absl::RFC3339_full,
        absl::FromUnixSeconds(t.seconds()) + absl::Nanoseconds(t.nanos()),
        absl::UTCTimeZone());
  }
  if (message.GetDescriptor() == google::protobuf::Duration::descriptor()) {
    const auto& d = static_cast<const google::protobuf::Duration&>(message);
    return static_cast<double>(d.seconds()) + d.nanos() * 1e-9;
  }
  return ToJson(message);
}

Json Singular(const Message& m, const FieldDescriptor* f) {
  const Reflection& r = *m.GetReflection();
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetInt32(m, f);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetInt64(m, f);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetUInt32(m, f);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetUInt64(m, f);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetDouble(m, f);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetFloat(m, f);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetBool(m, f);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(f->enum_type(), r.GetEnumValue(m, f));
    case FieldDescriptor::CPPTYPE_STRING:
      return r.GetString(m, f);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageValue(r.GetMessage(m, f));
  }
  return nullptr;
}

Json Element(const Message& m, const FieldDescriptor* f, int i) {
  const Reflection& r = *m.GetReflection();
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetRepeatedInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetRepeatedInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetRepeatedUInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetRepeatedUInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetRepeatedDouble(m, f, i);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetRepeatedFloat(m, f, i);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetRepeatedBool(m, f, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(f->enum_type(), r.GetRepeatedEnumValue(m, f, i));
    case FieldDescriptor::CPPTYPE_STRING:
      return r.GetRepeatedString(m, f, i);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageValue(r.GetRepeatedMessage(m, f, i));
  }
  return nullptr;
}

Json MapValue(const Message& m, const FieldDescriptor* f) {
  Json object = Json::object();
  const Reflection& r = *m.GetReflection();
  for (int i = 0; i < r.FieldSize(m, f); ++i) {
    const Message& entry = r.GetRepeatedMessage(m, f, i);
    const auto* key = f->message_type()->map_key();
    const auto* value = f->message_type()->map_value();
    // Every map of ours has strings for keys.
    object[entry.GetReflection()->GetString(entry, key)] =
        Singular(entry, value);
  }
  return object;
}

}  // namespace

std::string EnumWord(const EnumDescriptor* type, int value) {
  const auto* v = type->FindValueByNumber(value);
  if (v == nullptr) return std::to_string(value);
  if (value == 0) return "";
  // KIND_COMMITTED of an enum Kind, MODULE_STATE_COMMITTED of ModuleState: the
  // prefix is what the zero value has before UNSPECIFIED.
  const std::string zero = type->FindValueByNumber(0)->name();
  const size_t prefix = zero.size() - std::string("UNSPECIFIED").size();
  return absl::AsciiStrToLower(v->name().substr(prefix));
}

Json ToJson(const Message& message) {
  Json object = Json::object();
  const auto* type = message.GetDescriptor();
  const Reflection& r = *message.GetReflection();
  for (int i = 0; i < type->field_count(); ++i) {
    const FieldDescriptor* f = type->field(i);
    if (f->is_map()) {
      object[f->name()] = MapValue(message, f);
    } else if (f->is_repeated()) {
      Json array = Json::array();
      for (int j = 0; j < r.FieldSize(message, f); ++j) {
        array.push_back(Element(message, f, j));
      }
      object[f->name()] = std::move(array);
    } else if (!f->has_presence() || r.HasField(message, f)) {
      object[f->name()] = Singular(message, f);
    }
  }
  return object;
}

}  // namespace promptcache::cli
