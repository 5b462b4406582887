// Valid inputs, small, so that a million variations of them take minutes.

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using nlohmann::json;

std::string Joined(const std::vector<std::string>& files) {
  std::string text;
  for (size_t i = 0; i < files.size(); ++i) {
    if (i > 0) text += kFolderSeparator;
    text += files[i];
  }
  return text;
}

std::string TinyGguf(TensorType type, const std::string& pre_tokenizer) {
  return TinyLlama({.layers = 1,
                    .heads = 1,
                    .kv_heads = 1,
                    .head_dim = 32,
                    .hidden = 32,
                    .ffn = 32,
                    .vocab = 259,
                    .type = type,
                    .embedding_type = TensorType::kQ8_0,
                    .pre_tokenizer = pre_tokenizer})
      .Serialize();
}

json TinyLlamaConfig() {
  return {{"model_type", "llama"},
          {"hidden_size", 16},
          {"intermediate_size", 16},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"num_hidden_layers", 1},
          {"vocab_size", 20},
          {"max_position_embeddings", 64},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", true},
          {"hidden_act", "silu"},
          {"torch_dtype", "bfloat16"}};
}

std::string TinyLlamaWeights() {
  const std::string layer = "model.layers.0.";
  const std::map<std::string, std::vector<uint64_t>> tensors = {
      {"model.embed_tokens.weight", {20, 16}},
      {"model.norm.weight", {16}},
      {layer + "input_layernorm.weight", {16}},
      {layer + "post_attention_layernorm.weight", {16}},
      {layer + "self_attn.q_proj.weight", {16, 16}},
      {layer + "self_attn.k_proj.weight", {8, 16}},
      {layer + "self_attn.v_proj.weight", {8, 16}},
      {layer + "self_attn.o_proj.weight", {16, 16}},
      {layer + "mlp.gate_proj.weight", {16, 16}},
      {layer + "mlp.up_proj.weight", {16, 16}},
      {layer + "mlp.down_proj.weight", {16, 16}}};
  json header;
  uint64_t end = 0;
  for (const auto& [name, shape] : tensors) {
    uint64_t bytes = sizeof(uint16_t);
    for (const uint64_t dim : shape) bytes *= dim;
    header[name] = {{"dtype", "BF16"},
                    {"shape", shape},
                    {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const std::string text = header.dump();
  const uint64_t header_bytes = text.size();
  std::string out(reinterpret_cast<const char*>(&header_bytes),
                  sizeof(header_bytes));
  return out + text + std::string(end, '\x3c');
}

}  // namespace

std::vector<std::string> GgufSeeds() {
  return {TinyGguf(TensorType::kBf16, "smollm"),
          TinyGguf(TensorType::kQ4_1, "gpt-2"),
          TinyGguf(TensorType::kF32, "llama-bpe")};
}

std::vector<std::string> HfFolderSeeds() {
  const std::string models = TestDataPath("models");
  std::string tokenizer;
  std::vector<std::string> seeds;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(models)) {
    if (entry.path().filename() != "config.json") continue;
    const std::string folder = entry.path().parent_path().string();
    if (!std::filesystem::exists(folder + "/tokenizer.json")) continue;
    tokenizer = ReadFileOrDie(folder + "/tokenizer.json");
    // The reader of every family sees its config; weights would be too large.
    seeds.push_back(
        Joined({ReadFileOrDie(folder + "/config.json"), "", tokenizer,
                ReadFileOrDie(folder + "/tokenizer_config.json")}));
  }
  seeds.push_back(Joined({TinyLlamaConfig().dump(), TinyLlamaWeights()}));
  seeds.push_back(
      Joined({TinyLlamaConfig().dump(), TinyLlamaWeights(), tokenizer}));
  return seeds;
}

std::vector<std::string> PmlSeeds() {
  const json cases = json::parse(ReadFileOrDie(TestDataPath("pml/cases.json")));
  std::vector<std::string> seeds;
  for (const json& c : cases["cases"]) {
    if (!c.contains("prompt")) continue;
    seeds.push_back(Joined({c["schema"], c["prompt"]}));
  }
  return seeds;
}

}  // namespace promptcache::worker
