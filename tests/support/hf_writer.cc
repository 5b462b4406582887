#include "tests/support/hf_writer.h"

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/float_types.h"
#include "common/status_macros.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using nlohmann::json;

struct NamedTensor {
  std::string name;
  TensorView view;
  uint32_t rotated_heads = 0;  // of q and k
};

absl::StatusOr<std::vector<NamedTensor>> Tensors(const ModelFile& model) {
  const ModelConfig& config = model.config();
  struct Rule {
    TensorRole role;
    std::string_view name;
    uint32_t rotated_heads = 0;
  };
  const Rule kLayer[] = {
      {TensorRole::kAttentionNorm, "input_layernorm"},
      {TensorRole::kQuery, "self_attn.q_proj", config.num_heads},
      {TensorRole::kKey, "self_attn.k_proj", config.num_kv_heads},
      {TensorRole::kValue, "self_attn.v_proj"},
      {TensorRole::kAttentionOut, "self_attn.o_proj"},
      {TensorRole::kFfnNorm, "post_attention_layernorm"},
      {TensorRole::kFfnGate, "mlp.gate_proj"},
      {TensorRole::kFfnUp, "mlp.up_proj"},
      {TensorRole::kFfnDown, "mlp.down_proj"}};
  std::vector<NamedTensor> tensors;
  const auto add = [&](const Rule& rule, uint32_t layer,
                       const std::string& prefix) -> absl::Status {
    NamedTensor tensor = {.name = prefix + std::string(rule.name) + ".weight",
                          .rotated_heads = rule.rotated_heads};
    PC_ASSIGN_OR_RETURN(tensor.view, model.Tensor(rule.role, layer));
    tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  };
  PC_RETURN_IF_ERROR(
      add({TensorRole::kTokenEmbedding, "model.embed_tokens"}, 0, ""));
  PC_RETURN_IF_ERROR(add({TensorRole::kOutputNorm, "model.norm"}, 0, ""));
  for (uint32_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    for (const Rule& rule : kLayer) {
      PC_RETURN_IF_ERROR(add(rule, layer, prefix));
    }
  }
  return tensors;
}

// Norms are computed with in fp32.
bool IsVector(const TensorView& view) { return view.rows == 1; }

json TensorHeader(const std::vector<NamedTensor>& tensors) {
  json header;
  uint64_t end = 0;
  for (const auto& [name, view, rotated_heads] : tensors) {
    const uint64_t begin = end;
    end += view.rows * view.cols *
           (IsVector(view) ? sizeof(float) : sizeof(uint16_t));
    header[name] = {
        {"dtype", IsVector(view) ? "F32" : "BF16"},
        {"shape", IsVector(view) ? json::array({view.cols})
                                 : json::array({view.rows, view.cols})},
        {"data_offsets", {begin, end}}};
  }
  return header;
}

// Where the file has the row that the folder has at `row`: element 2 i + j of
// an interleaved head is element i + j dims/2 of a half-split one.
uint64_t SourceRow(const NamedTensor& tensor, uint64_t row) {
  if (tensor.rotated_heads == 0) return row;
  const uint64_t head_dim = tensor.view.rows / tensor.rotated_heads;
  const uint64_t in_head = row % head_dim;
  const uint64_t half = head_dim / 2;
  return row - in_head + 2 * (in_head % half) + in_head / half;
}

void WriteWeights(const std::vector<NamedTensor>& tensors,
                  const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  const std::string header = TensorHeader(tensors).dump();
  const uint64_t header_bytes = header.size();
  out.write(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  out << header;
  for (const NamedTensor& tensor : tensors) {
    std::vector<float> row(tensor.view.cols);
    std::vector<uint16_t> rounded(tensor.view.cols);
    for (uint64_t r = 0; r < tensor.view.rows; ++r) {
      DequantizeRow(tensor.view, SourceRow(tensor, r), row);
      if (IsVector(tensor.view)) {
        out.write(reinterpret_cast<const char*>(row.data()),
                  static_cast<std::streamsize>(row.size() * sizeof(float)));
        continue;
      }
      for (size_t i = 0; i < row.size(); ++i) rounded[i] = FloatToBf16(row[i]);
      out.write(
          reinterpret_cast<const char*>(rounded.data()),
          static_cast<std::streamsize>(rounded.size() * sizeof(uint16_t)));
    }
  }
}

json Config(const ModelFile& model) {
  const ModelConfig& config = model.config();
  return {{"model_type", "llama"},
          {"hidden_size", config.hidden_dim},
          {"intermediate_size", config.ffn_dim},
          {"num_attention_heads", config.num_heads},
          {"num_key_value_heads", config.num_kv_heads},
          {"num_hidden_layers", config.num_layers},
          {"head_dim", config.head_dim},
          {"vocab_size", config.vocab_size},
          {"max_position_embeddings", config.context_length},
          {"rms_norm_eps", config.norm_epsilon},
          {"rope_theta", config.rope.theta},
          {"tie_word_embeddings", config.tied_embeddings},
          {"hidden_act", "silu"},
          {"bos_token_id", model.vocabulary().bos_id},
          {"eos_token_id", model.vocabulary().eos_id},
          {"torch_dtype", "bfloat16"}};
}

json TokenizerJson(const VocabularyData& vocabulary) {
  constexpr int32_t kControl = 3;
  json added = json::array();
  json vocab;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    vocab[vocabulary.tokens[id]] = id;
    if (vocabulary.token_types[id] != kControl) continue;
    added.push_back({{"id", id},
                     {"content", vocabulary.tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Digits"}, {"individual_digits", true}}, byte_level}}}},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"vocab", vocab},
            {"merges", vocabulary.merges}}}};
}

}  // namespace

absl::Status WriteHfFolder(const ModelFile& model, const std::string& folder) {
  if (model.config().architecture != "llama" ||
      model.config().rope.pairing != RopePairing::kInterleaved ||
      model.vocabulary().model != "gpt2" ||
      model.vocabulary().pre_tokenizer != "smollm") {
    return absl::InvalidArgumentError(
        absl::StrCat(model.path(), ": not a llama with SmolLM's vocabulary"));
  }
  PC_ASSIGN_OR_RETURN(const auto tensors, Tensors(model));
  WriteWeights(tensors, folder + "/model.safetensors");
  const std::vector<std::string>& tokens = model.vocabulary().tokens;
  const json tokenizer_config = {
      {"bos_token", tokens[static_cast<size_t>(model.vocabulary().bos_id)]},
      {"eos_token", tokens[static_cast<size_t>(model.vocabulary().eos_id)]},
      {"add_bos_token", model.vocabulary().add_bos},
      {"chat_template", model.chat_template()}};
  WriteFileOrDie(folder + "/config.json", Config(model).dump());
  WriteFileOrDie(folder + "/tokenizer.json",
                 TokenizerJson(model.vocabulary()).dump());
  WriteFileOrDie(folder + "/tokenizer_config.json", tokenizer_config.dump());
  return absl::OkStatus();
}

}  // namespace promptcache::worker
