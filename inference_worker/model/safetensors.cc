#include "inference_worker/model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/json_text.h"

static_assert(std::endian::native == std::endian::little);

namespace promptcache::worker {
namespace {

using nlohmann::json;

// The format's own limit.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxDimensions = 8;
constexpr std::string_view kMetadata = "__metadata__";

struct DtypeInfo {
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array<DtypeInfo, 15> kDtypes = {{{"BOOL", 1},
                                                {"U8", 1},
                                                {"I8", 1},
                                                {"F8_E5M2", 1},
                                                {"F8_E4M3", 1},
                                                {"I16", 2},
                                                {"U16", 2},
                                                {"F16", 2},
                                                {"BF16", 2},
                                                {"I32", 4},
                                                {"U32", 4},
                                                {"F32", 4},
                                                {"F64", 8},
                                                {"I64", 8},
                                                {"U64", 8}}};

absl::Status TensorError(std::string_view name, std::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteGgufName(name), ": ", ToAbsl(message)));
}

// An array of unsigned integers, at most `max_count`.
std::optional<std::vector<uint64_t>> Integers(const json& value,
                                              size_t max_count) {
  if (!value.is_array() || value.size() > max_count) return std::nullopt;
  std::vector<uint64_t> numbers;
  for (const json& number : value) {
    if (!number.is_number_unsigned()) return std::nullopt;
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

absl::StatusOr<SafetensorsEntry> ReadEntry(std::string_view name,
                                           const json& header,
                                           std::span<const std::byte> data) {
  if (!header.is_object() || header.size() != 3 || !header.contains("dtype") ||
      !header.contains("shape") || !header.contains("data_offsets")) {
    return TensorError(name, "needs dtype, shape and data_offsets");
  }
  SafetensorsEntry entry;
  const json& dtype = header["dtype"];
  const auto info = std::find_if(
      kDtypes.begin(), kDtypes.end(), [&dtype](const DtypeInfo& candidate) {
        return dtype.is_string() &&
               dtype.get_ref<const std::string&>() == candidate.name;
      });
  if (info == kDtypes.end()) {
    return TensorError(
        name, absl::StrCat("dtype ", DescribeJson(dtype), " is not known"));
  }
  entry.dtype = std::string(info->name);
  const auto shape = Integers(header["shape"], kMaxDimensions);
  if (!shape.has_value()) {
    return TensorError(name, absl::StrCat("shape is not a list of at most ",
                                          kMaxDimensions, " sizes"));
  }
  entry.shape = *shape;
  uint64_t num_bytes = info->bytes;
  for (const uint64_t size : entry.shape) {
    if (__builtin_mul_overflow(num_bytes, size, &num_bytes)) {
      return TensorError(
          name, absl::StrCat("shape ", DescribeShape(*shape), " is too large"));
    }
  }
  const auto offsets = Integers(header["data_offsets"], 2);
  if (!offsets.has_value() || offsets->size() != 2) {
    return TensorError(name, "data_offsets are not two offsets");
  }
  const uint64_t begin = (*offsets)[0];
  const uint64_t end = (*offsets)[1];
  if (begin > end || end > data.size()) {
    return TensorError(name, absl::StrCat("data_offsets ", begin, " to ", end,
                                          " exceed the file's ", data.size(),
                                          " bytes of data"));
  }
  if (end - begin != num_bytes) {
    return TensorError(
        name, absl::StrCat("data_offsets ", begin, " to ", end, " are not the ",
                           num_bytes, " bytes of ", entry.dtype, " ",
                           DescribeShape(*shape)));
  }
  entry.data = data.subspan(begin, num_bytes);
  return entry;
}

// The format allows neither overlaps nor holes.
absl::Status CheckContiguous(
    const std::map<std::string, SafetensorsEntry>& entries,
    std::span<const std::byte> data) {
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  order.reserve(entries.size());
  for (const auto& entry : entries) order.push_back(&entry);
  // Empty tensors before the one that begins where they do.
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    const auto& x = a->second.data;
    const auto& y = b->second.data;
    return std::pair(x.data(), x.size()) < std::pair(y.data(), y.size());
  });
  const std::byte* expected = data.data();
  for (const auto* entry : order) {
    const auto& span = entry->second.data;
    if (span.data() != expected) {
      return TensorError(entry->first,
                         absl::StrCat("begins at ", span.data() - data.data(),
                                      ", but the data before it ends at ",
                                      expected - data.data(),
                                      ": tensors overlap or leave a "
                                      "hole"));
    }
    expected += span.size();
  }
  if (expected != data.data() + data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(data.data() + data.size() - expected,
                     " bytes after the last tensor belong to none"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string DescribeShape(std::span<const uint64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", shape[i]);
  }
  return text + "]";
}

absl::StatusOr<std::map<std::string, SafetensorsEntry>> ParseSafetensors(
    std::span<const std::byte> bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header length: needs 8 bytes, but the file has ", bytes.size()));
  }
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  bytes = bytes.subspan(sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes || header_bytes > bytes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "header length: ", header_bytes, " exceeds the ", bytes.size(),
        " bytes after it or the format's ", kMaxHeaderBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()),
                              header_bytes);
  auto header = ParseJsonObject(text);
  if (!header.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("header: ", header.status().message()));
  }
  const auto data = bytes.subspan(header_bytes);
  std::map<std::string, SafetensorsEntry> entries;
  for (const auto& [name, value] : header->items()) {
    if (name == kMetadata) continue;
    PC_ASSIGN_OR_RETURN(SafetensorsEntry entry, ReadEntry(name, value, data));
    entries.emplace(name, std::move(entry));
  }
  PC_RETURN_IF_ERROR(CheckContiguous(entries, data));
  return entries;
}

}  // namespace promptcache::worker
