#include "tests/inference_worker/engine/tiny_t5.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/status_macros.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using Json = nlohmann::json;

struct Tensor {
  std::vector<size_t> shape;
  std::vector<uint16_t> values;  // bf16
};
using Tensors = std::map<std::string, Tensor>;

std::string FolderOfTinyT5() { return TestDataPath("models/later/tiny-t5"); }

Tensors ReadTensors(const std::string& path) {
  const std::string bytes = ReadFileOrDie(path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  Tensors tensors;
  const Json header = Json::parse(bytes.substr(8, header_bytes));
  for (const auto& [name, info] : header.items()) {
    if (name == "__metadata__") continue;
    Tensor& tensor = tensors[name];
    info["shape"].get_to(tensor.shape);
    const size_t begin = info["data_offsets"][0];
    const size_t end = info["data_offsets"][1];
    tensor.values.resize((end - begin) / 2);
    std::memcpy(tensor.values.data(), bytes.data() + 8 + header_bytes + begin,
                end - begin);
  }
  return tensors;
}

void WriteTensors(const std::string& path, const Tensors& tensors) {
  Json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()),
                tensor.values.size() * 2);
    header[name] = {{"dtype", "BF16"},
                    {"shape", tensor.shape},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t header_bytes = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &header_bytes, 8);
  WriteFileOrDie(path, file + text + data);
}

// The first rows and columns of a matrix.
Tensor Corner(const Tensor& whole, size_t rows, size_t cols) {
  Tensor corner = {{rows, cols}, {}};
  for (size_t row = 0; row < rows; ++row) {
    const auto at =
        whole.values.begin() + static_cast<ptrdiff_t>(row * whole.shape[1]);
    corner.values.insert(corner.values.end(), at,
                         at + static_cast<ptrdiff_t>(cols));
  }
  return corner;
}

// The same matrix from its middle row on: other values of the same size.
Tensor Turned(const Tensor& matrix) {
  Tensor turned = matrix;
  std::rotate(
      turned.values.begin(),
      turned.values.begin() + static_cast<ptrdiff_t>(turned.values.size() / 2),
      turned.values.end());
  return turned;
}

Tensors GatedTensors(const Tensors& plain) {
  constexpr size_t kHeads = 3;
  constexpr size_t kInner = kHeads * 16;
  Tensors gated;
  for (const auto& [name, tensor] : plain) {
    if (name.starts_with("decoder.block.1.")) continue;
    const bool attention = name.find("Attention.") != std::string::npos;
    if (name.ends_with("relative_attention_bias.weight")) {
      gated[name] = Corner(tensor, tensor.shape[0], kHeads);
    } else if (attention && name.ends_with(".o.weight")) {
      gated[name] = Corner(tensor, tensor.shape[0], kInner);
    } else if (attention) {
      gated[name] = Corner(tensor, kInner, tensor.shape[1]);
    } else if (name.ends_with(".wi.weight")) {
      const std::string prefix =
          name.substr(0, name.size() - std::strlen(".weight"));
      gated[prefix + "_0.weight"] = tensor;
      gated[prefix + "_1.weight"] = Turned(tensor);
    } else {
      gated[name] = tensor;
    }
  }
  gated["lm_head.weight"] = Turned(plain.at("shared.weight"));
  return gated;
}

}  // namespace

std::unique_ptr<ModelFile> TinyT5() {
  auto file = OpenModelFile(FolderOfTinyT5(), {});
  PC_EXPECT_OK(file);
  return *std::move(file);
}

std::unique_ptr<ModelFile> TinyGatedT5() {
  TempDir dir;
  Json config = Json::parse(ReadFileOrDie(FolderOfTinyT5() + "/config.json"));
  config.erase("dense_act_fn");
  config.erase("is_gated_act");
  config.erase("scale_decoder_outputs");
  config["feed_forward_proj"] = "gated-gelu";
  config["tie_word_embeddings"] = false;
  config["num_heads"] = 3;
  config["num_decoder_layers"] = 1;
  WriteFileOrDie(dir.path() + "/config.json", config.dump());
  WriteTensors(
      dir.path() + "/model.safetensors",
      GatedTensors(ReadTensors(FolderOfTinyT5() + "/model.safetensors")));
  auto file = OpenModelFile(dir.path(), {});
  PC_EXPECT_OK(file);
  return *std::move(file);
}

GgufWriter GgufOfT5(const ModelFile& model) {
  const ModelConfig& c = model.config();
  GgufWriter writer;
  writer.SetString("general.architecture", "t5")
      .SetUint32("t5.context_length", 512)
      .SetUint32("t5.embedding_length", c.hidden_dim)
      .SetUint32("t5.feed_forward_length", c.ffn_dim)
      .SetUint32("t5.block_count", c.encoder_layers)
      .SetUint32("t5.decoder_block_count", c.num_layers)
      .SetUint32("t5.attention.head_count", c.num_heads)
      .SetUint32("t5.attention.key_length", c.head_dim)
      .SetUint32("t5.attention.value_length", c.head_dim)
      .SetFloat("t5.attention.layer_norm_epsilon", c.norm_epsilon)
      .SetFloat("t5.attention.layer_norm_rms_epsilon", c.norm_epsilon)
      .SetUint32("t5.attention.relative_buckets_count", c.relative_buckets)
      .SetUint32("t5.decoder_start_token_id",
                 static_cast<uint32_t>(c.decoder_start_token));
  const auto add = [&](TensorRole role, uint32_t layer,
                       const std::string& name) {
    const auto view = model.Tensor(role, layer);
    if (!view.ok()) return;
    std::vector<float> values(view->rows * view->cols);
    for (uint64_t row = 0; row < view->rows; ++row) {
      DequantizeRow(*view, row,
                    std::span(values).subspan(row * view->cols, view->cols));
    }
    writer.AddTensor(name + ".weight", TensorType::kF32, view->rows, view->cols,
                     values);
  };
  using enum TensorRole;
  const std::pair<TensorRole, const char*> whole[] = {
      {kTokenEmbedding, "token_embd"},
      {kOutput, "output"},
      {kOutputNorm, "dec.output_norm"},
      {kRelativeBias, "dec.blk.0.attn_rel_b"},
      {kEncoderOutputNorm, "enc.output_norm"},
      {kEncoderRelativeBias, "enc.blk.0.attn_rel_b"}};
  const std::pair<TensorRole, const char*> decoder[] = {
      {kAttentionNorm, "attn_norm"},
      {kQuery, "attn_q"},
      {kKey, "attn_k"},
      {kValue, "attn_v"},
      {kAttentionOut, "attn_o"},
      {kCrossNorm, "cross_attn_norm"},
      {kCrossQuery, "cross_attn_q"},
      {kCrossKey, "cross_attn_k"},
      {kCrossValue, "cross_attn_v"},
      {kCrossOut, "cross_attn_o"},
      {kFfnNorm, "ffn_norm"},
      {kFfnGate, "ffn_gate"},
      {kFfnUp, "ffn_up"},
      {kFfnDown, "ffn_down"}};
  const std::pair<TensorRole, const char*> encoder[] = {
      {kEncoderAttentionNorm, "attn_norm"},
      {kEncoderQuery, "attn_q"},
      {kEncoderKey, "attn_k"},
      {kEncoderValue, "attn_v"},
      {kEncoderAttentionOut, "attn_o"},
      {kEncoderFfnNorm, "ffn_norm"},
      {kEncoderFfnGate, "ffn_gate"},
      {kEncoderFfnUp, "ffn_up"},
      {kEncoderFfnDown, "ffn_down"}};
  for (const auto& [role, name] : whole) add(role, 0, name);
  for (uint32_t i = 0; i < c.num_layers; ++i) {
    for (const auto& [role, name] : decoder) {
      add(role, i, "dec.blk." + std::to_string(i) + "." + name);
    }
  }
  for (uint32_t i = 0; i < c.encoder_layers; ++i) {
    for (const auto& [role, name] : encoder) {
      add(role, i, "enc.blk." + std::to_string(i) + "." + name);
    }
  }
  return writer;
}

absl::Status EncodeSegment(Backend& backend, std::span<const int32_t> ids,
                           PrivateSpan& span) {
  PC_ASSIGN_OR_RETURN(RowGroup group,
                      span.Append(ids, {}, LogitsWanted::kNone));
  group.part = RowPart::kEncoder;
  std::vector<float> ignored;
  return backend.Forward({&group, 1}, &ignored);
}

}  // namespace promptcache::worker
