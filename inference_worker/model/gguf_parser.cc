#include "inference_worker/model/gguf_parser.h"

#include <bit>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"

static_assert(std::endian::native == std::endian::little);

namespace promptcache::worker {
namespace {

// Far above what any model has; they bound what a damaged file can cost.
constexpr uint64_t kMaxKeys = 1 << 16;
constexpr uint64_t kMaxTensors = 1 << 17;
constexpr uint64_t kMaxAlignment = 1 << 20;
constexpr int kMaxArrayDepth = 4;
// The format's own limits.
constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 64;

struct TypeInfo {
  const char* name;
  uint64_t scalar_bytes;
};
constexpr TypeInfo kTypes[] = {
    {"uint8", 1},  {"int8", 1},    {"uint16", 2},  {"int16", 2},  {"uint32", 4},
    {"int32", 4},  {"float32", 4}, {"bool", 1},    {"string", 0}, {"array", 0},
    {"uint64", 8}, {"int64", 8},   {"float64", 8},
};

absl::Status CheckType(uint32_t type, std::string_view what) {
  if (type < std::size(kTypes)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(what), ": unknown value type ", type));
}

absl::Status CheckBool(const GgufValue& value, std::string_view what) {
  for (const std::byte b : value.raw) {
    if (b != std::byte{0} && b != std::byte{1}) {
      return absl::InvalidArgumentError(
          absl::StrCat(ToAbsl(what), ": ", std::to_integer<int>(b),
                       " is not a bool, which is 0 or 1"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t GgufScalarBytes(GgufType type) {
  const auto index = static_cast<uint32_t>(type);
  return index < std::size(kTypes) ? kTypes[index].scalar_bytes : 0;
}

std::string GgufTypeName(GgufType type) {
  const auto index = static_cast<uint32_t>(type);
  return index < std::size(kTypes) ? kTypes[index].name
                                   : absl::StrCat("type ", index);
}

absl::StatusOr<std::span<const std::byte>> GgufParser::Take(
    uint64_t num_bytes, std::string_view what) {
  const uint64_t left = bytes_.size() - position_;
  if (num_bytes > left) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(what), ": needs ", num_bytes, " bytes at offset ",
                     position_, ", but the file ends after ", left));
  }
  const auto taken = bytes_.subspan(position_, num_bytes);
  position_ += num_bytes;
  return taken;
}

template <typename T>
absl::StatusOr<T> GgufParser::Number(std::string_view what) {
  PC_ASSIGN_OR_RETURN(const auto raw, Take(sizeof(T), what));
  T value;
  std::memcpy(&value, raw.data(), sizeof(value));
  return value;
}

absl::StatusOr<std::string_view> GgufParser::Text(std::string_view what) {
  PC_ASSIGN_OR_RETURN(const auto num_bytes, Number<uint64_t>(what));
  PC_ASSIGN_OR_RETURN(const auto raw, Take(num_bytes, what));
  return std::string_view(reinterpret_cast<const char*>(raw.data()),
                          raw.size());
}

absl::StatusOr<std::string_view> GgufParser::Name(std::string_view what,
                                                  uint64_t max_bytes) {
  PC_ASSIGN_OR_RETURN(const std::string_view name, Text(what));
  if (name.empty() || name.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(what), ": ", name.size(),
                     " bytes long; a name has 1 to ", max_bytes));
  }
  return name;
}

absl::StatusOr<GgufFile> GgufParser::Parse() {
  PC_RETURN_IF_ERROR(ParseHeader());
  GgufFile file;
  for (uint64_t i = 0; i < num_keys_; ++i) {
    PC_RETURN_IF_ERROR(ParseMetadata(i, &file));
  }
  PC_RETURN_IF_ERROR(ReadAlignment(&file));
  file.tensors_.reserve(num_tensors_);
  std::set<std::string_view> names;
  for (uint64_t i = 0; i < num_tensors_; ++i) {
    PC_RETURN_IF_ERROR(ParseTensor(i, &file));
    const GgufTensor& tensor = file.tensors_.back();
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuoteGgufName(tensor.name), ": the name occurs twice"));
    }
  }
  if (num_tensors_ > 0) {
    const uint64_t past_alignment = position_ % file.alignment_;
    if (past_alignment != 0) {
      PC_RETURN_IF_ERROR(
          Take(file.alignment_ - past_alignment, "padding before the data")
              .status());
    }
    file.data_ = bytes_.subspan(position_);
  }
  return file;
}

absl::Status GgufParser::ParseHeader() {
  PC_ASSIGN_OR_RETURN(const auto magic, Take(4, "magic"));
  if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
    return absl::InvalidArgumentError(
        "not a GGUF file: it does not begin with \"GGUF\"");
  }
  PC_ASSIGN_OR_RETURN(const auto version, Number<uint32_t>("version"));
  if (version != 2 && version != 3) {
    const bool swapped = version != 0 && (version & 0xFFFF) == 0;
    return absl::InvalidArgumentError(absl::StrCat(
        "version: ", version, swapped ? " (a big-endian file)" : "",
        " is not supported: 2 and 3 are"));
  }
  PC_ASSIGN_OR_RETURN(num_tensors_, Number<uint64_t>("tensor count"));
  PC_ASSIGN_OR_RETURN(num_keys_, Number<uint64_t>("metadata count"));
  if (num_tensors_ > kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor count: ", num_tensors_, " is more than ", kMaxTensors));
  }
  if (num_keys_ > kMaxKeys) {
    return absl::InvalidArgumentError(absl::StrCat(
        "metadata count: ", num_keys_, " is more than ", kMaxKeys));
  }
  return absl::OkStatus();
}

absl::Status GgufParser::ParseMetadata(uint64_t index, GgufFile* file) {
  PC_ASSIGN_OR_RETURN(
      const std::string_view key,
      Name(absl::StrCat("key of metadata ", index), kMaxKeyBytes));
  const std::string what = absl::StrCat("metadata ", QuoteGgufName(key));
  PC_ASSIGN_OR_RETURN(const GgufValue value, Value(what));
  if (!file->values_.emplace(key, value).second) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the key occurs twice"));
  }
  return absl::OkStatus();
}

absl::StatusOr<GgufValue> GgufParser::Value(std::string_view what) {
  PC_ASSIGN_OR_RETURN(const auto type, Number<uint32_t>(what));
  PC_RETURN_IF_ERROR(CheckType(type, what));
  GgufValue value{.type = static_cast<GgufType>(type)};
  if (value.type == GgufType::kArray) return Array(what, /*depth=*/1);
  if (value.type == GgufType::kString) {
    PC_ASSIGN_OR_RETURN(const std::string_view text, Text(what));
    value.raw = std::as_bytes(std::span(text.data(), text.size()));
    return value;
  }
  PC_ASSIGN_OR_RETURN(value.raw, Take(GgufScalarBytes(value.type), what));
  if (value.type == GgufType::kBool) {
    PC_RETURN_IF_ERROR(CheckBool(value, what));
  }
  return value;
}

absl::StatusOr<GgufValue> GgufParser::Array(std::string_view what, int depth) {
  if (depth > kMaxArrayDepth) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(what), ": arrays nested more than ", kMaxArrayDepth, " deep"));
  }
  PC_ASSIGN_OR_RETURN(const auto element, Number<uint32_t>(what));
  PC_RETURN_IF_ERROR(CheckType(element, what));
  GgufValue value{.type = GgufType::kArray,
                  .element = static_cast<GgufType>(element)};
  PC_ASSIGN_OR_RETURN(value.count, Number<uint64_t>(what));
  const uint64_t begin = position_;
  const uint64_t scalar_bytes = GgufScalarBytes(value.element);
  // The least that an element takes: a string's length, an array's header.
  const uint64_t least_bytes =
      scalar_bytes > 0 ? scalar_bytes
                       : (value.element == GgufType::kString ? 8 : 12);
  if (value.count > (bytes_.size() - begin) / least_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(what), ": ", value.count, " elements of ",
        GgufTypeName(value.element), " at offset ", begin,
        ", but the file ends after ", bytes_.size() - begin, " bytes"));
  }
  if (scalar_bytes > 0) {
    PC_RETURN_IF_ERROR(Take(value.count * scalar_bytes, what).status());
  } else {
    for (uint64_t i = 0; i < value.count; ++i) {
      PC_RETURN_IF_ERROR(value.element == GgufType::kString
                             ? Text(what).status()
                             : Array(what, depth + 1).status());
    }
  }
  value.raw = bytes_.subspan(begin, position_ - begin);
  if (value.element == GgufType::kBool) {
    PC_RETURN_IF_ERROR(CheckBool(value, what));
  }
  return value;
}

absl::Status GgufParser::ReadAlignment(GgufFile* file) {
  constexpr std::string_view kKey = "general.alignment";
  if (file->Find(kKey) == nullptr) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const uint32_t alignment, file->Uint32(kKey));
  if (alignment < 8 || alignment > kMaxAlignment ||
      !std::has_single_bit(alignment)) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata general.alignment: ", alignment,
                     " is not a power of two from 8 to ", kMaxAlignment));
  }
  file->alignment_ = alignment;
  return absl::OkStatus();
}

absl::Status GgufParser::ParseTensor(uint64_t index, GgufFile* file) {
  GgufTensor tensor;
  PC_ASSIGN_OR_RETURN(tensor.name, Name(absl::StrCat("name of tensor ", index),
                                        kMaxTensorNameBytes));
  const std::string what = absl::StrCat("tensor ", QuoteGgufName(tensor.name));
  PC_ASSIGN_OR_RETURN(tensor.num_dims, Number<uint32_t>(what));
  if (tensor.num_dims < 1 || tensor.num_dims > tensor.dims.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", tensor.num_dims, " dimensions; a tensor has 1 to 4"));
  }
  uint64_t elements = 1;
  for (uint32_t i = 0; i < tensor.num_dims; ++i) {
    PC_ASSIGN_OR_RETURN(tensor.dims[i], Number<uint64_t>(what));
    if (tensor.dims[i] == 0 ||
        __builtin_mul_overflow(elements, tensor.dims[i], &elements)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": dimension ", i, " is ", tensor.dims[i],
                       ", which is empty or overflows"));
    }
  }
  PC_ASSIGN_OR_RETURN(tensor.type, Number<uint32_t>(what));
  PC_ASSIGN_OR_RETURN(tensor.offset, Number<uint64_t>(what));
  if (tensor.offset % file->alignment_ != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": offset ", tensor.offset,
                     " is not a multiple of the alignment ", file->alignment_));
  }
  file->tensors_.push_back(tensor);
  return absl::OkStatus();
}

}  // namespace promptcache::worker
