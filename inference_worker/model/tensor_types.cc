#include "inference_worker/model/tensor_types.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/strings.h"
#include "glog/logging.h"

namespace promptcache::worker {
namespace {

constexpr std::array<TensorTypeInfo, 14> kTypes = {{
    {TensorType::kF32, "F32", 0, 1, 4},
    {TensorType::kF16, "F16", 1, 1, 2},
    {TensorType::kBf16, "BF16", 30, 1, 2},
    {TensorType::kQ8_0, "Q8_0", 8, 32, 34},
    {TensorType::kQ4_0, "Q4_0", 2, 32, 18},
    {TensorType::kQ4_1, "Q4_1", 3, 32, 20},
    {TensorType::kQ5_0, "Q5_0", 6, 32, 22},
    {TensorType::kQ5_1, "Q5_1", 7, 32, 24},
    {TensorType::kQ2_K, "Q2_K", 10, 256, 84},
    {TensorType::kQ3_K, "Q3_K", 11, 256, 110},
    {TensorType::kQ4_K, "Q4_K", 12, 256, 144},
    {TensorType::kQ5_K, "Q5_K", 13, 256, 176},
    {TensorType::kQ6_K, "Q6_K", 14, 256, 210},
    {TensorType::kIq4Nl, "IQ4_NL", 20, 32, 18},
}};

// Types of the format that we cannot compute with yet: names for messages.
struct OtherType {
  uint32_t gguf_id;
  const char* name;
};
constexpr std::array kOtherTypes = {
    OtherType{9, "Q8_1"},    OtherType{15, "Q8_K"},    OtherType{16, "IQ2_XXS"},
    OtherType{17, "IQ2_XS"}, OtherType{18, "IQ3_XXS"}, OtherType{19, "IQ1_S"},
    OtherType{21, "IQ3_S"},  OtherType{22, "IQ2_S"},   OtherType{23, "IQ4_XS"},
    OtherType{24, "I8"},     OtherType{25, "I16"},     OtherType{26, "I32"},
    OtherType{27, "I64"},    OtherType{28, "F64"},     OtherType{29, "IQ1_M"},
    OtherType{34, "TQ1_0"},  OtherType{35, "TQ2_0"},   OtherType{39, "MXFP4"},
};

}  // namespace

std::span<const TensorTypeInfo> SupportedTensorTypes() { return kTypes; }

const TensorTypeInfo& InfoOf(TensorType type) {
  const auto it = std::find_if(
      kTypes.begin(), kTypes.end(),
      [type](const TensorTypeInfo& info) { return info.type == type; });
  CHECK(it != kTypes.end()) << static_cast<int>(type);
  return *it;
}

const TensorTypeInfo* FindGgufTensorType(uint32_t gguf_id) {
  const auto it = std::find_if(kTypes.begin(), kTypes.end(),
                               [gguf_id](const TensorTypeInfo& info) {
                                 return info.gguf_id == gguf_id;
                               });
  return it == kTypes.end() ? nullptr : &*it;
}

const TensorTypeInfo* FindPlainTensorType(std::string_view name) {
  const auto it = std::find_if(
      kTypes.begin(), kTypes.end(), [name](const TensorTypeInfo& info) {
        return info.block_elements == 1 && info.name == name;
      });
  return it == kTypes.end() ? nullptr : &*it;
}

std::string DescribeGgufTensorType(uint32_t gguf_id) {
  const char* name = "unknown";
  if (const TensorTypeInfo* info = FindGgufTensorType(gguf_id)) {
    name = info->name;
  }
  for (const OtherType& other : kOtherTypes) {
    if (other.gguf_id == gguf_id) name = other.name;
  }
  return absl::StrCat(name, " (", gguf_id, ")");
}

std::string SupportedTensorTypeNames() {
  std::string names;
  for (const TensorTypeInfo& info : kTypes) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", info.name);
  }
  return names;
}

std::optional<uint64_t> TensorBytes(TensorType type, uint64_t rows,
                                    uint64_t cols) {
  const TensorTypeInfo& info = InfoOf(type);
  if (cols % info.block_elements != 0) return std::nullopt;
  uint64_t row_bytes = 0;
  uint64_t num_bytes = 0;
  if (__builtin_mul_overflow(cols / info.block_elements,
                             uint64_t{info.block_bytes}, &row_bytes) ||
      __builtin_mul_overflow(row_bytes, rows, &num_bytes)) {
    return std::nullopt;
  }
  return num_bytes;
}

std::span<const std::byte> RowBytes(const TensorView& view, uint64_t row) {
  CHECK_LT(row, view.rows) << view.name;
  if (view.run != 0) row = row / view.run * view.run_stride + row % view.run;
  const TensorTypeInfo& info = InfoOf(view.type);
  const size_t row_bytes = view.cols / info.block_elements * info.block_bytes;
  return view.data.subspan(row * row_bytes, row_bytes);
}

std::string_view TensorTypeName(TensorType type) { return InfoOf(type).name; }

}  // namespace promptcache::worker
