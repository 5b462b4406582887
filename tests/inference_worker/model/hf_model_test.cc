// The tiny folders of every family: their configs field by field, and each
// role's matrix against the raw tensor, read here without the code under test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/float_types.h"
#include "inference_worker/model/model_file.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Folder(const std::string& name) {
  return TestDataPath("models/" + name);
}

std::unique_ptr<ModelFile> OpenTiny(const std::string& name) {
  auto model = OpenModelFile(Folder(name), {});
  EXPECT_THAT(model, IsOk());
  return model.ok() ? *std::move(model) : nullptr;
}

// A BF16 tensor as the file has it.
struct Raw {
  std::vector<uint64_t> shape;
  std::vector<float> values;
  float at(uint64_t row, uint64_t col) const {
    return values.at(row * shape.at(1) + col);
  }
};

std::map<std::string, Raw> ReadRaw(const std::string& name) {
  const std::string bytes = ReadFileOrDie(Folder(name) + "/model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  std::map<std::string, Raw> raw;
  for (const auto& [tensor, info] : header.items()) {
    if (tensor == "__metadata__") continue;
    Raw& out = raw[tensor];
    out.shape = info["shape"].get<std::vector<uint64_t>>();
    const size_t begin = info["data_offsets"][0];
    const size_t end = info["data_offsets"][1];
    for (size_t i = begin; i < end; i += 2) {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes.data() + 8 + header_bytes + i, 2);
      out.values.push_back(Bf16ToFloat(bits));
    }
  }
  return raw;
}

// That the role's matrix is, element by element, what `expected` says.
void ExpectTensor(const ModelFile& model, TensorRole role, uint32_t layer,
                  uint64_t rows, uint64_t cols,
                  const std::function<float(uint64_t, uint64_t)>& expected) {
  const auto view = model.Tensor(role, layer);
  PC_ASSERT_OK(view);
  ASSERT_EQ(view->rows, rows) << view->name;
  ASSERT_EQ(view->cols, cols) << view->name;
  std::vector<float> row(cols);
  for (uint64_t r = 0; r < rows; ++r) {
    DequantizeRow(*view, r, row);
    for (uint64_t c = 0; c < cols; ++c) {
      ASSERT_EQ(row[c], expected(r, c))
          << view->name << " row " << r << " column " << c;
    }
  }
}

TEST(HfModelTest, Llama2) {
  const auto model = OpenTiny("tiny-llama2");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "llama");
  EXPECT_EQ(c.name, "tiny-llama2");
  EXPECT_EQ(c.num_layers, 2u);
  EXPECT_EQ(c.vocab_size, 384u);
  EXPECT_EQ(c.context_length, 512u);
  EXPECT_EQ(c.rope.dims, c.head_dim);
  EXPECT_EQ(c.rope.pairing, RopePairing::kHalfSplit);
  EXPECT_EQ(c.rope.scaling.kind, RopeScalingKind::kNone);
  EXPECT_EQ(c.positions, PositionKind::kRope);
  EXPECT_EQ(c.norm, NormKind::kRms);
  EXPECT_EQ(c.activation, Activation::kSilu);
  EXPECT_TRUE(c.gated_ffn);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_FALSE(c.tied_embeddings);
  EXPECT_THAT(c.layer_windows, IsEmpty());
  EXPECT_EQ(c.embedding_scale, 1.0f);
  EXPECT_THAT(
      model->Tensor(TensorRole::kQueryBias, 0),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor has role")));
  EXPECT_THAT(model->tokenizer_json(), HasSubstr("\"model\""));
  EXPECT_THAT(model->chat_template(), HasSubstr("<|im_start|>"));
  EXPECT_EQ(model->vocabulary().bos_id, 1);
  EXPECT_EQ(model->vocabulary().eos_id, 2);
  EXPECT_THAT(model->vocabulary().end_ids, ElementsAre(2));
}

TEST(HfModelTest, Llama3) {
  const auto model = OpenTiny("tiny-llama3");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.hidden_dim, 128u);
  EXPECT_EQ(c.num_heads, 8u);
  EXPECT_EQ(c.num_kv_heads, 2u);
  EXPECT_EQ(c.head_dim, 16u);
  EXPECT_EQ(c.ffn_dim, 128u);
  EXPECT_EQ(c.norm_epsilon, 1e-5f);
  EXPECT_EQ(c.rope.theta, 500000.0f);
  const RopeScaling& scaling = c.rope.scaling;
  EXPECT_EQ(scaling.kind, RopeScalingKind::kLlama3);
  EXPECT_EQ(scaling.factor, 8.0f);
  EXPECT_EQ(scaling.low_freq_factor, 1.0f);
  EXPECT_EQ(scaling.high_freq_factor, 4.0f);
  EXPECT_EQ(scaling.original_context, 64u);
  EXPECT_THAT(scaling.divisors, IsEmpty());
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_THAT(model->Tensor(TensorRole::kOutput, 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor")));
}

TEST(HfModelTest, LinearAndYarnScaling) {
  const auto linear = OpenTiny("tiny-llama-linear");
  ASSERT_NE(linear, nullptr);
  EXPECT_EQ(linear->config().rope.scaling.kind, RopeScalingKind::kLinear);
  EXPECT_EQ(linear->config().rope.scaling.factor, 2.0f);
  const auto yarn = OpenTiny("tiny-llama-yarn");
  ASSERT_NE(yarn, nullptr);
  const RopeScaling& scaling = yarn->config().rope.scaling;
  EXPECT_EQ(scaling.kind, RopeScalingKind::kYarn);
  EXPECT_EQ(scaling.factor, 4.0f);
  EXPECT_EQ(scaling.original_context, 64u);
  EXPECT_EQ(scaling.beta_fast, 32.0f);
  EXPECT_EQ(scaling.beta_slow, 1.0f);
  EXPECT_EQ(scaling.attention_factor, 0.0f);
}

TEST(HfModelTest, MistralHeadsWiderThanTheHiddenDimension) {
  const auto model = OpenTiny("tiny-mistral");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "mistral");
  EXPECT_EQ(c.hidden_dim, 64u);
  EXPECT_EQ(c.num_heads * c.head_dim, 128u);
  EXPECT_EQ(c.rope.theta, 1e6f);
  EXPECT_THAT(c.layer_windows, IsEmpty());
}

TEST(HfModelTest, Qwen2HasBiasesOfQKAndV) {
  const auto model = OpenTiny("tiny-qwen2");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "qwen2");
  EXPECT_EQ(c.vocab_size, 400u);
  EXPECT_EQ(c.norm_epsilon, 1e-6f);
  const auto raw = ReadRaw("tiny-qwen2");
  const Raw& bias = raw.at("model.layers.1.self_attn.k_proj.bias");
  ExpectTensor(*model, TensorRole::kKeyBias, 1, 1, 32,
               [&](uint64_t, uint64_t i) { return bias.values.at(i); });
  EXPECT_THAT(model->Tensor(TensorRole::kAttentionOutBias, 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor")));
}

TEST(HfModelTest, Qwen3HasNormsOfQAndK) {
  const auto model = OpenTiny("tiny-qwen3");
  ASSERT_NE(model, nullptr);
  EXPECT_TRUE(model->config().qk_norm);
  EXPECT_EQ(model->config().head_dim, 32u);
  const auto norm = model->Tensor(TensorRole::kKeyNorm, 1);
  PC_ASSERT_OK(norm);
  EXPECT_EQ(norm->cols, 32u);
}

TEST(HfModelTest, Gemma3) {
  const auto model = OpenTiny("later/tiny-gemma3-text");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "gemma3");
  EXPECT_EQ(c.activation, Activation::kGeluTanh);
  EXPECT_TRUE(c.gated_ffn);
  EXPECT_EQ(c.norm_weight_offset, 1.0f);
  EXPECT_EQ(c.embedding_scale, 8.0f);
  EXPECT_FLOAT_EQ(c.attention_scale, 1 / std::sqrt(24.0f));
  EXPECT_THAT(c.layer_windows, ElementsAre(16, 16, 0));
  EXPECT_EQ(c.rope.theta, 1e6f);
  EXPECT_EQ(c.local_rope_theta, 10000.0f);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_TRUE(c.post_norms);
  EXPECT_TRUE(c.tied_embeddings);
  const auto raw = ReadRaw("later/tiny-gemma3-text");
  const auto expect_norm = [&](TensorRole role, const std::string& name) {
    const Raw& norm = raw.at("model.layers.2." + name + ".weight");
    ExpectTensor(*model, role, 2, 1, 64,
                 [&](uint64_t, uint64_t i) { return norm.values.at(i); });
  };
  expect_norm(TensorRole::kAttentionNorm, "input_layernorm");
  expect_norm(TensorRole::kPostAttentionNorm, "post_attention_layernorm");
  expect_norm(TensorRole::kFfnNorm, "pre_feedforward_layernorm");
  expect_norm(TensorRole::kPostFfnNorm, "post_feedforward_layernorm");
}

TEST(HfModelTest, Phi3FusesWhatItMultipliesAtOnce) {
  const auto model = OpenTiny("later/tiny-phi3");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.head_dim, 32u);
  EXPECT_EQ(c.num_kv_heads, 1u);
  EXPECT_EQ(c.rope.dims, 24u);
  const auto raw = ReadRaw("later/tiny-phi3");
  const Raw& qkv = raw.at("model.layers.1.self_attn.qkv_proj.weight");
  const Raw& gate_up = raw.at("model.layers.1.mlp.gate_up_proj.weight");
  const auto from = [](const Raw& fused, uint64_t first) {
    return [&fused, first](uint64_t r, uint64_t col) {
      return fused.at(first + r, col);
    };
  };
  ExpectTensor(*model, TensorRole::kQuery, 1, 64, 64, from(qkv, 0));
  ExpectTensor(*model, TensorRole::kKey, 1, 32, 64, from(qkv, 64));
  ExpectTensor(*model, TensorRole::kValue, 1, 32, 64, from(qkv, 96));
  ExpectTensor(*model, TensorRole::kFfnGate, 1, 160, 64, from(gate_up, 0));
  ExpectTensor(*model, TensorRole::kFfnUp, 1, 160, 64, from(gate_up, 160));
}

TEST(HfModelTest, FalconWithOneKvHead) {
  const auto model = OpenTiny("later/tiny-falcon");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "falcon");
  EXPECT_EQ(c.num_kv_heads, 1u);
  EXPECT_EQ(c.norm, NormKind::kLayer);
  EXPECT_EQ(c.activation, Activation::kGelu);
  EXPECT_FALSE(c.gated_ffn);
  EXPECT_EQ(c.residual, ResidualKind::kParallel);
  EXPECT_TRUE(c.shared_parallel_norm);
  EXPECT_THAT(model->Tensor(TensorRole::kFfnNorm, 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor")));
  const auto raw = ReadRaw("later/tiny-falcon");
  const Raw& qkv =
      raw.at("transformer.h.0.self_attention.query_key_value.weight");
  ExpectTensor(*model, TensorRole::kQuery, 0, 64, 64,
               [&](uint64_t r, uint64_t i) { return qkv.at(r, i); });
  ExpectTensor(*model, TensorRole::kKey, 0, 16, 64,
               [&](uint64_t r, uint64_t i) { return qkv.at(64 + r, i); });
  ExpectTensor(*model, TensorRole::kValue, 0, 16, 64,
               [&](uint64_t r, uint64_t i) { return qkv.at(80 + r, i); });
}

TEST(HfModelTest, FalconInGroups) {
  const auto model = OpenTiny("later/tiny-falcon-new");
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->config().num_kv_heads, 2u);
  EXPECT_FALSE(model->config().shared_parallel_norm);
  PC_EXPECT_OK(model->Tensor(TensorRole::kFfnNormBias, 1));
  const auto raw = ReadRaw("later/tiny-falcon-new");
  const Raw& qkv =
      raw.at("transformer.h.1.self_attention.query_key_value.weight");
  // A group: two heads of q, one of k, one of v, of 16 rows each.
  ExpectTensor(
      *model, TensorRole::kQuery, 1, 64, 64,
      [&](uint64_t r, uint64_t i) { return qkv.at(r / 32 * 64 + r % 32, i); });
  ExpectTensor(*model, TensorRole::kKey, 1, 32, 64,
               [&](uint64_t r, uint64_t i) {
                 return qkv.at(r / 16 * 64 + 32 + r % 16, i);
               });
  ExpectTensor(*model, TensorRole::kValue, 1, 32, 64,
               [&](uint64_t r, uint64_t i) {
                 return qkv.at(r / 16 * 64 + 48 + r % 16, i);
               });
}

// Rows and, of the bias, elements by head: q, k, v of 16 (or 32) each.
void ExpectByHead(const ModelFile& model, const Raw& weight, const Raw& bias) {
  const uint64_t dim = model.config().head_dim;
  const TensorRole roles[] = {TensorRole::kQuery, TensorRole::kKey,
                              TensorRole::kValue};
  const TensorRole biases[] = {TensorRole::kQueryBias, TensorRole::kKeyBias,
                               TensorRole::kValueBias};
  for (uint64_t part = 0; part < 3; ++part) {
    const auto place = [&](uint64_t r) {
      return r / dim * 3 * dim + part * dim + r % dim;
    };
    ExpectTensor(model, roles[part], 1, 64, 64, [&](uint64_t r, uint64_t i) {
      return weight.at(place(r), i);
    });
    ExpectTensor(model, biases[part], 1, 1, 64, [&](uint64_t, uint64_t i) {
      return bias.values.at(place(i));
    });
  }
}

TEST(HfModelTest, FalconWithAlibi) {
  const auto model = OpenTiny("later/tiny-falcon-alibi");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.positions, PositionKind::kAlibi);
  EXPECT_TRUE(c.alibi_before_scale);
  EXPECT_EQ(c.residual, ResidualKind::kSequential);
  EXPECT_EQ(c.num_kv_heads, 4u);
  PC_EXPECT_OK(model->Tensor(TensorRole::kFfnUpBias, 0));
  const auto raw = ReadRaw("later/tiny-falcon-alibi");
  const std::string name = "transformer.h.1.self_attention.query_key_value";
  ExpectByHead(*model, raw.at(name + ".weight"), raw.at(name + ".bias"));
}

TEST(HfModelTest, GptNeox) {
  const auto model = OpenTiny("later/tiny-gptneox");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "gptneox");
  EXPECT_EQ(c.head_dim, 32u);
  EXPECT_EQ(c.rope.dims, 8u);
  EXPECT_EQ(c.residual, ResidualKind::kParallel);
  EXPECT_FALSE(c.shared_parallel_norm);
  EXPECT_EQ(c.ffn_dim, 192u);
  const auto raw = ReadRaw("later/tiny-gptneox");
  const std::string name = "gpt_neox.layers.1.attention.query_key_value";
  ExpectByHead(*model, raw.at(name + ".weight"), raw.at(name + ".bias"));
}

TEST(HfModelTest, Mpt) {
  const auto model = OpenTiny("later/tiny-mpt");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.hidden_dim, 96u);
  EXPECT_EQ(c.num_heads, 6u);
  EXPECT_EQ(c.ffn_dim, 384u);
  EXPECT_EQ(c.positions, PositionKind::kAlibi);
  EXPECT_FALSE(c.alibi_before_scale);
  EXPECT_EQ(c.alibi_max_bias, 8.0f);
  EXPECT_EQ(c.norm, NormKind::kLayer);
  EXPECT_THAT(model->Tensor(TensorRole::kAttentionNormBias, 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tensor")));
  const auto raw = ReadRaw("later/tiny-mpt");
  const Raw& qkv = raw.at("transformer.blocks.0.attn.Wqkv.weight");
  ExpectTensor(*model, TensorRole::kKey, 0, 96, 96,
               [&](uint64_t r, uint64_t i) { return qkv.at(96 + r, i); });
}

TEST(HfModelTest, Gpt2LiesTransposed) {
  const auto model = OpenTiny("later/tiny-gpt2");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.positions, PositionKind::kLearned);
  EXPECT_EQ(c.position_table_offset, 0u);
  EXPECT_EQ(c.activation, Activation::kGeluTanh);
  EXPECT_EQ(c.ffn_dim, 256u);
  const auto raw = ReadRaw("later/tiny-gpt2");
  const Raw& qkv = raw.at("transformer.h.1.attn.c_attn.weight");
  const Raw& bias = raw.at("transformer.h.1.attn.c_attn.bias");
  const Raw& down = raw.at("transformer.h.1.mlp.c_proj.weight");
  ExpectTensor(*model, TensorRole::kValue, 1, 64, 64,
               [&](uint64_t r, uint64_t i) { return qkv.at(i, 128 + r); });
  ExpectTensor(*model, TensorRole::kKeyBias, 1, 1, 64,
               [&](uint64_t, uint64_t i) { return bias.values.at(64 + i); });
  ExpectTensor(*model, TensorRole::kFfnDown, 1, 64, 256,
               [&](uint64_t r, uint64_t i) { return down.at(i, r); });
  const auto positions = model->Tensor(TensorRole::kPositionEmbedding, 0);
  PC_ASSERT_OK(positions);
  EXPECT_EQ(positions->rows, 256u);
}

TEST(HfModelTest, Opt) {
  const auto model = OpenTiny("later/tiny-opt");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.activation, Activation::kRelu);
  EXPECT_EQ(c.position_table_offset, 2u);
  const auto positions = model->Tensor(TensorRole::kPositionEmbedding, 0);
  PC_ASSERT_OK(positions);
  EXPECT_EQ(positions->rows, 258u);
  PC_EXPECT_OK(model->Tensor(TensorRole::kAttentionOutBias, 1));
}

TEST(HfModelTest, T5) {
  const auto model = OpenTiny("later/tiny-t5");
  ASSERT_NE(model, nullptr);
  const ModelConfig& c = model->config();
  EXPECT_EQ(c.architecture, "t5");
  EXPECT_TRUE(c.is_encoder_decoder());
  EXPECT_EQ(c.encoder_layers, 2u);
  EXPECT_EQ(c.num_layers, 2u);
  EXPECT_EQ(c.num_kv_heads, 4u);
  EXPECT_EQ(c.head_dim, 16u);
  EXPECT_EQ(c.ffn_dim, 128u);
  EXPECT_EQ(c.positions, PositionKind::kRelative);
  EXPECT_EQ(c.relative_buckets, 32u);
  EXPECT_EQ(c.relative_max_distance, 128u);
  EXPECT_EQ(c.decoder_start_token, 0);
  EXPECT_EQ(c.activation, Activation::kRelu);
  EXPECT_FALSE(c.gated_ffn);
  EXPECT_EQ(c.attention_scale, 1.0f);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(c.output_scale, 0.125f);
  const auto raw = ReadRaw("later/tiny-t5");
  using enum TensorRole;
  const std::map<TensorRole, std::string> names = {
      {kTokenEmbedding, "shared"},
      {kQuery, "decoder.block.1.layer.0.SelfAttention.q"},
      {kCrossValue, "decoder.block.1.layer.1.EncDecAttention.v"},
      {kCrossOut, "decoder.block.1.layer.1.EncDecAttention.o"},
      {kFfnDown, "decoder.block.1.layer.2.DenseReluDense.wo"},
      {kRelativeBias,
       "decoder.block.0.layer.0.SelfAttention.relative_attention_bias"},
      {kEncoderKey, "encoder.block.1.layer.0.SelfAttention.k"},
      {kEncoderFfnUp, "encoder.block.1.layer.1.DenseReluDense.wi"},
      {kEncoderRelativeBias,
       "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"}};
  for (const auto& [role, name] : names) {
    const Raw& tensor = raw.at(name + ".weight");
    ExpectTensor(*model, role, 1, tensor.shape[0], tensor.shape[1],
                 [&](uint64_t r, uint64_t i) { return tensor.at(r, i); });
  }
}

// A copy of a tiny folder whose files a test may change.
class HfRefusalTest : public ::testing::Test {
 protected:
  void Copy(const std::string& name) {
    folder_ = dir_.path() + "/model";
    fs::remove_all(folder_);
    fs::copy(Folder(name), folder_);
  }
  void Configure(const std::string& pointer, const nlohmann::json& value) {
    auto config =
        nlohmann::json::parse(ReadFileOrDie(folder_ + "/config.json"));
    config[nlohmann::json::json_pointer(pointer)] = value;
    WriteFileOrDie(folder_ + "/config.json", config.dump());
  }
  absl::Status Open() { return OpenModelFile(folder_, {}).status(); }
  void ExpectRefused(const std::string& message) {
    EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr(message)));
  }
  // Splits the weights in two files with an index.
  nlohmann::json Shard();

  TempDir dir_;
  std::string folder_;
};

TEST_F(HfRefusalTest, NamesKeyAndValue) {
  struct Case {
    std::string folder, pointer;
    nlohmann::json value;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"tiny-llama2", "/model_type", "umt5",
       "config.json: model_type: \"umt5\" is"},
      {"tiny-llama2", "/hidden_act", "mish", "hidden_act: \"mish\""},
      {"tiny-llama2", "/mlp_bias", true, "mlp_bias: true is not supported"},
      {"tiny-llama2", "/num_attention_heads", -4,
       "num_attention_heads: -4 is not an integer from 1"},
      {"tiny-llama2", "/num_key_value_heads", 3, "num_key_value_heads: 3"},
      {"tiny-llama2", "/rms_norm_eps", "x", "rms_norm_eps: \"x\""},
      {"tiny-llama2", "/is_encoder_decoder", true, "is_encoder_decoder: true"},
      {"tiny-llama2",
       "/quantization_config",
       {{"bits", 4}},
       "quantization_config: an object of 1"},
      {"tiny-llama2", "/hidden_size", 128,
       "model.safetensors: tensor \"model.embed_tokens.weight\": shape"},
      {"tiny-llama2", "/num_hidden_layers", 1, "is not one of a 1-layer llama"},
      {"tiny-llama2", "/eos_token_id", 384, "eos_token_id: 384 is not a token"},
      {"tiny-llama3", "/rope_parameters/rope_type", "magic",
       "rope_parameters.rope_type: \"magic\""},
      {"tiny-llama3", "/rope_parameters/factor", 0,
       "rope_parameters.factor: 0"},
      {"tiny-llama3",
       "/rope_parameters/full_attention",
       {{"rope_theta", 1.0}},
       "rope_parameters.full_attention: an object of 1"},
      {"tiny-llama-yarn", "/rope_parameters/truncate", false,
       "rope_parameters.truncate: false"},
      {"later/tiny-gemma3-text", "/final_logit_softcapping", 30.0,
       "final_logit_softcapping: 30.0"},
      {"later/tiny-gemma3-text", "/layer_types/1", "chunked",
       "layer_types[1]: \"chunked\""},
      {"later/tiny-mpt", "/attn_config/qk_ln", true, "attn_config.qk_ln: true"},
      {"later/tiny-mpt", "/attn_config/clip_qkv", 8, "attn_config.clip_qkv: 8"},
      {"later/tiny-opt", "/do_layer_norm_before", false,
       "do_layer_norm_before: false"},
      {"later/tiny-phi3", "/partial_rotary_factor", 1.5,
       "partial_rotary_factor"},
      {"later/tiny-t5", "/is_encoder_decoder", false,
       "is_encoder_decoder: false"},
      {"later/tiny-t5", "/feed_forward_proj", "gated-mish",
       "feed_forward_proj: \"gated-mish\""},
      {"later/tiny-t5", "/dense_act_fn", "silu",
       "dense_act_fn: \"silu\" is not supported; with feed_forward_proj relu"},
      {"later/tiny-t5", "/is_gated_act", true, "is_gated_act: true"},
      {"later/tiny-t5", "/decoder_start_token_id", 384,
       "decoder_start_token_id: 384"},
      {"later/tiny-t5", "/num_layers", 3,
       "encoder.block.2.layer.0.layer_norm.weight\" is missing"},
      {"later/tiny-t5", "/num_decoder_layers", 1, "is not one of a 1-layer t5"},
  };
  for (const Case& c : cases) {
    Copy(c.folder);
    if (c.pointer == "/partial_rotary_factor") {
      Configure("/rope_parameters", nullptr);
    }
    Configure(c.pointer, c.value);
    SCOPED_TRACE(c.folder + " " + c.pointer);
    ExpectRefused(c.message);
  }
}

TEST_F(HfRefusalTest, OlderKeysAloneMeanTheSame) {
  for (const char* name :
       {"tiny-llama3", "tiny-llama-yarn", "tiny-llama-linear",
        "later/tiny-gemma3-text", "later/tiny-gptneox", "later/tiny-phi3"}) {
    Copy(name);
    Configure("/rope_parameters", nullptr);
    Configure("/dtype", nullptr);
    const auto older = OpenModelFile(folder_, {});
    PC_ASSERT_OK(older);
    const auto newer = OpenTiny(name);
    EXPECT_EQ(*(*older)->Fingerprint(), *newer->Fingerprint()) << name;
  }
}

TEST_F(HfRefusalTest, WhatAnEncoderDecoderIsComputedWithIsInItsFingerprint) {
  Copy("later/tiny-t5");
  const Digest plain = *(*OpenModelFile(folder_, {}))->Fingerprint();
  for (const auto& [pointer, value] :
       std::vector<std::pair<std::string, nlohmann::json>>{
           {"/relative_attention_max_distance", 64},
           {"/decoder_start_token_id", 7},
           {"/scale_decoder_outputs", false}}) {
    Copy("later/tiny-t5");
    Configure(pointer, value);
    const auto changed = OpenModelFile(folder_, {});
    PC_ASSERT_OK(changed);
    EXPECT_NE(*(*changed)->Fingerprint(), plain) << pointer;
  }
}

TEST_F(HfRefusalTest, LengthDependentRotationsAreTold) {
  Copy("tiny-llama2");
  Configure("/rope_parameters",
            {{"rope_type", "dynamic"}, {"factor", 2.0}, {"rope_theta", 1e4}});
  auto model = OpenModelFile(folder_, {});
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().rope.scaling.kind, RopeScalingKind::kDynamicNtk);
  const std::vector<float> factors((*model)->config().rope.dims / 2, 1.5f);
  Configure("/rope_parameters", {{"rope_type", "longrope"},
                                 {"short_factor", factors},
                                 {"long_factor", factors},
                                 {"original_max_position_embeddings", 256},
                                 {"rope_theta", 1e4}});
  model = OpenModelFile(folder_, {});
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().rope.scaling.kind, RopeScalingKind::kLongRope);
  EXPECT_EQ((*model)->config().rope.scaling.long_divisors, factors);
  EXPECT_FLOAT_EQ((*model)->config().rope.scaling.attention_factor,
                  std::sqrt(1 + std::log(2.0f) / std::log(256.0f)));
}

TEST_F(HfRefusalTest, SlidingWindowsByLayer) {
  Copy("tiny-mistral");
  Configure("/sliding_window", 8);
  auto model = OpenModelFile(folder_, {});
  PC_ASSERT_OK(model);
  EXPECT_THAT((*model)->config().layer_windows, ElementsAre(8, 8));
  Copy("tiny-qwen2");
  Configure("/sliding_window", 8);
  model = OpenModelFile(folder_, {});
  PC_ASSERT_OK(model);
  EXPECT_THAT((*model)->config().layer_windows, IsEmpty());
  Configure("/use_sliding_window", true);
  Configure("/max_window_layers", 1);
  Configure("/layer_types", nullptr);
  model = OpenModelFile(folder_, {});
  PC_ASSERT_OK(model);
  EXPECT_THAT((*model)->config().layer_windows, ElementsAre(0, 8));
}

TEST_F(HfRefusalTest, NotJson) {
  Copy("tiny-llama2");
  const std::string config = folder_ + "/config.json";
  WriteFileOrDie(config, "{\"a\": 1, \"a\": 2}");
  ExpectRefused("config.json: key \"a\" occurs twice");
  WriteFileOrDie(config, "{\"a\": " + std::string(100000, '['));
  ExpectRefused("config.json: nested deeper than 32");
  WriteFileOrDie(config, "{\"a\": 1");
  ExpectRefused("config.json: not JSON at byte");
  WriteFileOrDie(config, "[]");
  ExpectRefused("config.json: a JSON array, not an object");
  fs::remove(config);
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kNotFound,
                               HasSubstr("no config.json")));
}

TEST_F(HfRefusalTest, DamagedSafetensors) {
  Copy("tiny-smollm");
  const std::string path = folder_ + "/model.safetensors";
  const std::string good = ReadFileOrDie(path);
  const auto replace = [&](const std::string& from, const std::string& to) {
    ASSERT_EQ(from.size(), to.size());
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    WriteFileOrDie(path, bad);
  };
  WriteFileOrDie(path, good.substr(0, 5));
  ExpectRefused("header length: needs 8 bytes");
  WriteFileOrDie(path, good.substr(0, 1000));
  ExpectRefused("header length");
  WriteFileOrDie(path, good.substr(0, good.size() - 1));
  ExpectRefused("bytes of data");
  WriteFileOrDie(path, good + "x");
  ExpectRefused("1 bytes after the last tensor");
  replace("\"BF16\"", "\"BG16\"");
  ExpectRefused("dtype \"BG16\" is not known");
  replace("\"BF16\"", "\"I16\" ");
  ExpectRefused("dtype I16 is not supported");
  replace("[384,", "[383,");
  ExpectRefused("are not the");
}

nlohmann::json HfRefusalTest::Shard() {
  const std::string bytes = ReadFileOrDie(folder_ + "/model.safetensors");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  nlohmann::json headers[2];
  std::string data[2];
  nlohmann::json index;
  size_t number = 0;
  for (const auto& [tensor, info] : header.items()) {
    if (tensor == "__metadata__") continue;
    const size_t shard = number++ % 2;
    const size_t begin = info["data_offsets"][0];
    const size_t end = info["data_offsets"][1];
    nlohmann::json moved = info;
    moved["data_offsets"] = {data[shard].size(),
                             data[shard].size() + end - begin};
    headers[shard][tensor] = moved;
    data[shard] += bytes.substr(8 + header_bytes + begin, end - begin);
    index["weight_map"][tensor] =
        shard == 0 ? "a.safetensors" : "b.safetensors";
  }
  for (int shard : {0, 1}) {
    const std::string text = headers[shard].dump();
    const uint64_t size = text.size();
    WriteFileOrDie(folder_ + (shard == 0 ? "/a" : "/b") + ".safetensors",
                   std::string(reinterpret_cast<const char*>(&size), 8) + text +
                       data[shard]);
  }
  fs::remove(folder_ + "/model.safetensors");
  WriteFileOrDie(folder_ + "/model.safetensors.index.json", index.dump());
  return index;
}

TEST_F(HfRefusalTest, ShardsAreOneModel) {
  Copy("tiny-smollm");
  nlohmann::json index = Shard();
  const auto sharded = OpenModelFile(folder_, {});
  PC_ASSERT_OK(sharded);
  EXPECT_EQ(*(*sharded)->Fingerprint(),
            *OpenTiny("tiny-smollm")->Fingerprint());

  const auto write = [&] {
    WriteFileOrDie(folder_ + "/model.safetensors.index.json", index.dump());
  };
  const nlohmann::json good = index;
  index["weight_map"]["model.norm.weight"] = "../a.safetensors";
  write();
  ExpectRefused("\"../a.safetensors\" is not a file of the folder");
  index = good;
  index["weight_map"].erase("model.norm.weight");
  write();
  ExpectRefused("but the index does not list it");
  index = good;
  index["weight_map"]["other"] = "a.safetensors";
  write();
  ExpectRefused("tensor \"other\": does not lie in a.safetensors");
  fs::remove(folder_ + "/b.safetensors");
  EXPECT_THAT(Open(), StatusIs(absl::StatusCode::kNotFound,
                               HasSubstr("b.safetensors")));
}

TEST_F(HfRefusalTest, TheFingerprintCoversTheConfig) {
  Copy("tiny-llama2");
  const auto fingerprint = [&] {
    const auto model = OpenModelFile(
        folder_, {.fingerprint_cache_dir = dir_.path() + "/cache"});
    EXPECT_THAT(model, IsOk());
    return *(*model)->Fingerprint();
  };
  const Digest digest = fingerprint();
  EXPECT_EQ(fingerprint(), digest);
  Configure("/rope_parameters/rope_theta", 20000.0);
  EXPECT_NE(fingerprint(), digest);
}

}  // namespace
}  // namespace promptcache::worker
