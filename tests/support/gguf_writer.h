#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// `values` in the given type, rounded to nearest as the format's own
// quantisers do. REQUIRES: whole blocks (32 for the quantised types).
std::string EncodeTensor(TensorType type, std::span<const float> values);

// Builds GGUF files, valid or not: nothing is checked. Thread-compatible.
class GgufWriter {
 public:
  explicit GgufWriter(uint32_t version = 3) : version_(version) {}

  // Metadata; a key that is there already keeps its place and gets the value.
  GgufWriter& SetString(std::string_view key, std::string_view value);
  GgufWriter& SetUint32(std::string_view key, uint32_t value);
  GgufWriter& SetFloat(std::string_view key, float value);
  GgufWriter& SetBool(std::string_view key, bool value);
  GgufWriter& SetStrings(std::string_view key,
                         const std::vector<std::string>& values);
  GgufWriter& SetInt32s(std::string_view key,
                        const std::vector<int32_t>& values);
  // Any type number over any bytes.
  GgufWriter& SetRaw(std::string_view key, uint32_t type, std::string bytes);
  // Adds the key once more.
  GgufWriter& RepeatKey(std::string_view key);
  GgufWriter& Remove(std::string_view key);

  // A matrix [rows, cols], or a vector when rows is 1.
  GgufWriter& AddTensor(std::string_view name, TensorType type, uint64_t rows,
                        uint64_t cols, std::span<const float> values);
  // dims[0] is contiguous; any type number over any bytes.
  GgufWriter& AddRawTensor(std::string_view name, std::vector<uint64_t> dims,
                           uint32_t type, std::string bytes);
  GgufWriter& RemoveTensor(std::string_view name);
  // What the file says of a tensor, without changing its data.
  struct Tensor {
    std::string name;
    std::vector<uint64_t> dims;
    uint32_t type = 0;
    std::string bytes;
    int64_t offset = -1;  // -1: where the data lies
  };
  Tensor& tensor(std::string_view name);

  // `boundaries`, when not null, gets the offset at which each field ends.
  std::string Serialize(std::vector<size_t>* boundaries = nullptr) const;
  void Write(const std::string& path) const;

 private:
  struct Entry {
    std::string key;
    uint32_t type = 0;
    std::string bytes;
  };

  uint32_t version_;
  std::vector<Entry> entries_;
  std::vector<Tensor> tensors_;
};

// A llama with random weights, and a byte-level BPE vocabulary with the ChatML
// control tokens: ids 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|> (the end
// of a turn), 3 to 258 the bytes, then merged English, then unused tokens.
struct TinyLlamaSpec {
  uint32_t layers = 2;
  uint32_t heads = 4;
  uint32_t kv_heads = 2;
  uint32_t head_dim = 16;
  uint32_t hidden = 64;
  uint32_t ffn = 96;
  uint32_t vocab = 320;  // at least 259
  uint32_t context = 2048;
  uint32_t rope_dims = 0;  // 0: head_dim
  float rope_theta = 10000.0f;
  float norm_epsilon = 1e-5f;
  uint64_t seed = 1;
  TensorType type = TensorType::kBf16;            // of the matrices
  TensorType embedding_type = TensorType::kBf16;  // and of the output
  bool tied_embeddings = true;
  std::string pre_tokenizer = "smollm";
  std::string name = "tiny";
};

GgufWriter TinyLlama(const TinyLlamaSpec& spec);
void WriteTinyLlama(const std::string& path, const TinyLlamaSpec& spec = {});

}  // namespace promptcache::worker
