#include "tests/support/gguf_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/float_types.h"
#include "glog/logging.h"
#include "inference_worker/model/tensor_types.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

constexpr size_t kBlock = 32;
constexpr size_t kAlignment = 32;

template <typename T>
void Append(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendString(std::string* out, std::string_view text) {
  Append(out, uint64_t{text.size()});
  out->append(text);
}

// Two 4-bit values a byte: i with i + 16.
void AppendNibbles(std::string* out, const int (&q)[kBlock]) {
  for (size_t i = 0; i < kBlock / 2; ++i) {
    out->push_back(static_cast<char>(q[i] | q[i + kBlock / 2] << 4));
  }
}

void AppendQ8_0(std::string* out, std::span<const float> x) {
  float largest = 0;
  for (const float v : x) largest = std::max(largest, std::fabs(v));
  const float d = largest / 127;
  Append(out, FloatToHalf(d));
  for (const float v : x) {
    Append(out, static_cast<int8_t>(d == 0 ? 0 : std::lround(v / d)));
  }
}

void AppendQ4_0(std::string* out, std::span<const float> x) {
  // The value farthest from zero becomes -8, so that all of the range is used.
  float extreme = 0;
  for (const float v : x) {
    if (std::fabs(v) > std::fabs(extreme)) extreme = v;
  }
  const float d = extreme / -8;
  Append(out, FloatToHalf(d));
  int q[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    const long level = d == 0 ? 8 : std::lround(x[i] / d) + 8;
    q[i] = static_cast<int>(std::clamp(level, 0L, 15L));
  }
  AppendNibbles(out, q);
}

void AppendQ4_1(std::string* out, std::span<const float> x) {
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  const float d = (*high - *low) / 15;
  Append(out, FloatToHalf(d));
  Append(out, FloatToHalf(*low));
  int q[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    const long level = d == 0 ? 0 : std::lround((x[i] - *low) / d);
    q[i] = static_cast<int>(std::clamp(level, 0L, 15L));
  }
  AppendNibbles(out, q);
}

}  // namespace

std::string EncodeTensor(TensorType type, std::span<const float> values) {
  std::string out;
  switch (type) {
    case TensorType::kF32:
      for (const float v : values) Append(&out, v);
      return out;
    case TensorType::kF16:
      for (const float v : values) Append(&out, FloatToHalf(v));
      return out;
    case TensorType::kBf16:
      for (const float v : values) Append(&out, FloatToBf16(v));
      return out;
    default:
      break;
  }
  CHECK(type == TensorType::kQ8_0 || type == TensorType::kQ4_0 ||
        type == TensorType::kQ4_1)
      << "cannot write " << TensorTypeName(type);
  CHECK_EQ(values.size() % kBlock, 0u);
  const auto append = type == TensorType::kQ8_0   ? AppendQ8_0
                      : type == TensorType::kQ4_0 ? AppendQ4_0
                                                  : AppendQ4_1;
  for (size_t i = 0; i < values.size(); i += kBlock) {
    append(&out, values.subspan(i, kBlock));
  }
  return out;
}

GgufWriter& GgufWriter::SetRaw(std::string_view key, uint32_t type,
                               std::string bytes) {
  for (Entry& entry : entries_) {
    if (entry.key != key) continue;
    entry.type = type;
    entry.bytes = std::move(bytes);
    return *this;
  }
  entries_.push_back({std::string(key), type, std::move(bytes)});
  return *this;
}

GgufWriter& GgufWriter::SetString(std::string_view key,
                                  std::string_view value) {
  std::string bytes;
  AppendString(&bytes, value);
  return SetRaw(key, 8, std::move(bytes));
}

GgufWriter& GgufWriter::SetUint32(std::string_view key, uint32_t value) {
  std::string bytes;
  Append(&bytes, value);
  return SetRaw(key, 4, std::move(bytes));
}

GgufWriter& GgufWriter::SetFloat(std::string_view key, float value) {
  std::string bytes;
  Append(&bytes, value);
  return SetRaw(key, 6, std::move(bytes));
}

GgufWriter& GgufWriter::SetBool(std::string_view key, bool value) {
  return SetRaw(key, 7, std::string(1, value ? '\1' : '\0'));
}

GgufWriter& GgufWriter::SetStrings(std::string_view key,
                                   const std::vector<std::string>& values) {
  std::string bytes;
  Append(&bytes, uint32_t{8});
  Append(&bytes, uint64_t{values.size()});
  for (const std::string& value : values) AppendString(&bytes, value);
  return SetRaw(key, 9, std::move(bytes));
}

GgufWriter& GgufWriter::SetInt32s(std::string_view key,
                                  const std::vector<int32_t>& values) {
  std::string bytes;
  Append(&bytes, uint32_t{5});
  Append(&bytes, uint64_t{values.size()});
  for (const int32_t value : values) Append(&bytes, value);
  return SetRaw(key, 9, std::move(bytes));
}

GgufWriter& GgufWriter::RepeatKey(std::string_view key) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].key != key) continue;
    entries_.push_back(Entry(entries_[i]));
    return *this;
  }
  LOG(FATAL) << "no key " << key;
}

GgufWriter& GgufWriter::Remove(std::string_view key) {
  std::erase_if(entries_, [key](const Entry& e) { return e.key == key; });
  return *this;
}

GgufWriter& GgufWriter::AddTensor(std::string_view name, TensorType type,
                                  uint64_t rows, uint64_t cols,
                                  std::span<const float> values) {
  CHECK_EQ(values.size(), rows * cols) << name;
  std::vector<uint64_t> dims = {cols};
  if (rows != 1) dims.push_back(rows);
  return AddRawTensor(name, std::move(dims), InfoOf(type).gguf_id,
                      EncodeTensor(type, values));
}

GgufWriter& GgufWriter::AddRawTensor(std::string_view name,
                                     std::vector<uint64_t> dims, uint32_t type,
                                     std::string bytes) {
  tensors_.push_back(
      {std::string(name), std::move(dims), type, std::move(bytes), -1});
  return *this;
}

GgufWriter& GgufWriter::RemoveTensor(std::string_view name) {
  std::erase_if(tensors_, [name](const Tensor& t) { return t.name == name; });
  return *this;
}

GgufWriter::Tensor& GgufWriter::tensor(std::string_view name) {
  for (Tensor& t : tensors_) {
    if (t.name == name) return t;
  }
  LOG(FATAL) << "no tensor " << name;
}

std::string GgufWriter::Serialize(std::vector<size_t>* boundaries) const {
  std::string out;
  const auto mark = [&] {
    if (boundaries != nullptr) boundaries->push_back(out.size());
  };
  const auto pad = [](std::string* bytes) {
    bytes->resize((bytes->size() + kAlignment - 1) / kAlignment * kAlignment);
  };
  out.append("GGUF"), mark();
  Append(&out, version_), mark();
  Append(&out, uint64_t{tensors_.size()}), mark();
  Append(&out, uint64_t{entries_.size()}), mark();
  for (const Entry& entry : entries_) {
    AppendString(&out, entry.key), mark();
    Append(&out, entry.type), mark();
    out.append(entry.bytes), mark();
  }
  std::string data;
  for (const Tensor& tensor : tensors_) {
    AppendString(&out, tensor.name), mark();
    Append(&out, static_cast<uint32_t>(tensor.dims.size())), mark();
    for (const uint64_t dim : tensor.dims) Append(&out, dim), mark();
    Append(&out, tensor.type), mark();
    pad(&data);
    Append(&out, tensor.offset < 0 ? uint64_t{data.size()}
                                   : static_cast<uint64_t>(tensor.offset));
    mark();
    data.append(tensor.bytes);
  }
  if (!tensors_.empty()) pad(&out), mark();
  out.append(data), mark();
  return out;
}

void GgufWriter::Write(const std::string& path) const {
  WriteFileOrDie(path, Serialize());
}

}  // namespace promptcache::worker
