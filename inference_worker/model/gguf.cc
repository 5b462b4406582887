#include "inference_worker/model/gguf.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf_parser.h"

namespace promptcache::worker {
namespace {

template <typename T>
T Load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

std::string_view AsText(std::span<const std::byte> raw) {
  return {reinterpret_cast<const char*>(raw.data()), raw.size()};
}

// Calls `visit` with the scalar at `p`; false for what is no number.
template <typename Visitor>
bool VisitNumber(GgufType type, const std::byte* p, const Visitor& visit) {
  switch (type) {
    case GgufType::kUint8:
      return visit(Load<uint8_t>(p)), true;
    case GgufType::kInt8:
      return visit(int16_t{Load<int8_t>(p)}), true;
    case GgufType::kUint16:
      return visit(Load<uint16_t>(p)), true;
    case GgufType::kInt16:
      return visit(Load<int16_t>(p)), true;
    case GgufType::kUint32:
      return visit(Load<uint32_t>(p)), true;
    case GgufType::kInt32:
      return visit(Load<int32_t>(p)), true;
    case GgufType::kUint64:
      return visit(Load<uint64_t>(p)), true;
    case GgufType::kInt64:
      return visit(Load<int64_t>(p)), true;
    case GgufType::kFloat32:
      return visit(Load<float>(p)), true;
    case GgufType::kFloat64:
      return visit(Load<double>(p)), true;
    case GgufType::kBool:
    case GgufType::kString:
    case GgufType::kArray:
      return false;
  }
  return false;
}

// The integer at `p`, whatever its width, if it is one and fits T.
template <typename T>
bool LoadInteger(GgufType type, const std::byte* p, T* out) {
  bool fits = false;
  VisitNumber(type, p, [&](auto value) {
    if constexpr (std::is_integral_v<decltype(value)>) {
      fits = std::in_range<T>(value);
      if (fits) *out = static_cast<T>(value);
    }
  });
  return fits;
}

absl::Status WrongType(std::string_view key, const GgufValue& value,
                       const char* wanted) {
  return absl::InvalidArgumentError(absl::StrCat("metadata ", ToAbsl(key), ": ",
                                                 DescribeGgufValue(value),
                                                 " is not ", wanted));
}

absl::StatusOr<const GgufValue*> Require(const GgufFile& file,
                                         std::string_view key) {
  if (const GgufValue* value = file.Find(key)) return value;
  return absl::InvalidArgumentError(
      absl::StrCat("metadata ", ToAbsl(key), " is missing"));
}

}  // namespace

absl::StatusOr<GgufFile> GgufFile::Parse(std::span<const std::byte> bytes) {
  return GgufParser(bytes).Parse();
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

absl::StatusOr<uint32_t> GgufFile::Uint32(std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  uint32_t out = 0;
  if (!LoadInteger(value->type, value->raw.data(), &out)) {
    return WrongType(key, *value, "an unsigned 32-bit integer");
  }
  return out;
}

absl::StatusOr<float> GgufFile::Float(std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  if (value->type == GgufType::kFloat32) return Load<float>(value->raw.data());
  if (value->type == GgufType::kFloat64) {
    return static_cast<float>(Load<double>(value->raw.data()));
  }
  return WrongType(key, *value, "a floating-point number");
}

absl::StatusOr<bool> GgufFile::Bool(std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  if (value->type != GgufType::kBool) {
    return WrongType(key, *value, "true or false");
  }
  return value->raw[0] != std::byte{0};
}

absl::StatusOr<std::string> GgufFile::String(std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  if (value->type != GgufType::kString) {
    return WrongType(key, *value, "a string");
  }
  return std::string(AsText(value->raw));
}

absl::StatusOr<std::vector<std::string>> GgufFile::Strings(
    std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  if (value->type != GgufType::kArray || value->element != GgufType::kString) {
    return WrongType(key, *value, "an array of strings");
  }
  std::vector<std::string> out;
  out.reserve(value->count);
  const std::byte* p = value->raw.data();  // lengths were checked by Parse
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto num_bytes = Load<uint64_t>(p);
    p += sizeof(num_bytes);
    out.emplace_back(reinterpret_cast<const char*>(p), num_bytes);
    p += num_bytes;
  }
  return out;
}

absl::StatusOr<std::vector<int32_t>> GgufFile::Int32s(
    std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  const uint64_t element_bytes = GgufScalarBytes(value->element);
  if (value->type != GgufType::kArray || element_bytes == 0) {
    return WrongType(key, *value, "an array of integers");
  }
  std::vector<int32_t> out(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    if (!LoadInteger(value->element, &value->raw[i * element_bytes], &out[i])) {
      return WrongType(key, *value, "an array of 32-bit integers");
    }
  }
  return out;
}

absl::StatusOr<std::vector<float>> GgufFile::Floats(
    std::string_view key) const {
  PC_ASSIGN_OR_RETURN(const GgufValue* value, Require(*this, key));
  if (value->type != GgufType::kArray || value->element != GgufType::kFloat32) {
    return WrongType(key, *value, "an array of 32-bit floats");
  }
  std::vector<float> out(value->count);
  if (!out.empty()) {
    std::memcpy(out.data(), value->raw.data(), value->raw.size());
  }
  return out;
}

std::string DescribeGgufValue(const GgufValue& value) {
  if (value.type == GgufType::kString) {
    return QuoteGgufName(AsText(value.raw));
  }
  if (value.type == GgufType::kBool) {
    return value.raw[0] != std::byte{0} ? "true" : "false";
  }
  if (value.type == GgufType::kArray) {
    return absl::StrCat("array of ", value.count, " ",
                        GgufTypeName(value.element));
  }
  std::string text;
  VisitNumber(value.type, value.raw.data(), [&text](auto number) {
    if constexpr (sizeof(number) == 1) {
      text = absl::StrCat(static_cast<int>(number));
    } else {
      text = absl::StrCat(number);
    }
  });
  return text;
}

std::string QuoteGgufName(std::string_view name) {
  constexpr size_t kMaxShown = 80;
  const bool cut = name.size() > kMaxShown;
  return absl::StrCat("\"", absl::CHexEscape(ToAbsl(name.substr(0, kMaxShown))),
                      cut ? "\"..." : "\"");
}

}  // namespace promptcache::worker
