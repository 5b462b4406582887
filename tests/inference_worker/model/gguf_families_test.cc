// GGUF files of the families, written from the tiny folders with the keys and
// names of llama.cpp's converter: the same config and the same tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "inference_worker/model/model_file.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::Each;

using ::testing::HasSubstr;
using ::testing::SizeIs;

// Writes what a folder holds as a GGUF file.
class Converter {
 public:
  Converter(const std::string& folder, const std::string& architecture)
      : arch_(architecture) {
    auto model = OpenModelFile(TestDataPath("models/" + folder), {});
    EXPECT_THAT(model, IsOk());
    model_ = *std::move(model);
    const ModelConfig& c = model_->config();
    writer.SetString("general.architecture", arch_);
    Set("block_count", c.num_layers);
    Set("embedding_length", c.hidden_dim);
    Set("feed_forward_length", c.ffn_dim);
    Set("context_length", c.context_length);
    Set("attention.head_count", c.num_heads);
    Set("attention.head_count_kv", c.num_kv_heads);
    writer.SetFloat(
        arch_ + (c.norm == NormKind::kRms ? ".attention.layer_norm_rms_epsilon"
                                          : ".attention.layer_norm_epsilon"),
        c.norm_epsilon);
    if (c.hidden_dim != c.num_heads * c.head_dim) {
      Set("attention.key_length", c.head_dim);
      Set("attention.value_length", c.head_dim);
    }
    if (c.positions == PositionKind::kRope) {
      Set("rope.dimension_count", c.rope.dims);
      writer.SetFloat(arch_ + ".rope.freq_base", c.rope.theta);
    }
  }

  void Set(const std::string& suffix, uint32_t value) {
    writer.SetUint32(arch_ + "." + suffix, value);
  }
  // The roles' tensors one below the other; absent ones are left out.
  void Add(const std::string& pattern, const std::vector<TensorRole>& roles,
           float added = 0) {
    const bool per_layer = pattern.find("blk.") == 0;
    for (uint32_t i = 0; i < (per_layer ? model_->config().num_layers : 1);
         ++i) {
      std::vector<float> values;
      uint64_t rows = 0, cols = 0;
      for (const TensorRole role : roles) {
        const auto view = model_->Tensor(role, i);
        if (!view.ok()) continue;
        rows += view->rows;
        cols = view->cols;
        std::vector<float> row(cols);
        for (uint64_t r = 0; r < view->rows; ++r) {
          DequantizeRow(*view, r, row);
          for (const float v : row) values.push_back(v + added);
        }
      }
      if (rows == 0) continue;
      // Biases that are fused lie one behind the other.
      if (rows == roles.size() && rows > 1) {
        cols = values.size();
        rows = 1;
      }
      std::string name = pattern;
      if (per_layer) name.insert(4, std::to_string(i) + ".");
      writer.AddTensor(name, TensorType::kF32, rows, cols, values);
    }
  }
  void AddWithBias(const std::string& pattern,
                   const std::vector<TensorRole>& roles,
                   const std::vector<TensorRole>& biases) {
    Add(pattern + ".weight", roles);
    Add(pattern + ".bias", biases);
  }
  // What all families have in common, q, k and v fused or not.
  void AddCommon(bool fused_qkv) {
    using enum TensorRole;
    Add("token_embd.weight", {kTokenEmbedding});
    Add("position_embd.weight", {kPositionEmbedding});
    AddWithBias("output_norm", {kOutputNorm}, {kOutputNormBias});
    Add("output.weight", {kOutput});
    if (fused_qkv) {
      AddWithBias("blk.attn_qkv", {kQuery, kKey, kValue},
                  {kQueryBias, kKeyBias, kValueBias});
    } else {
      AddWithBias("blk.attn_q", {kQuery}, {kQueryBias});
      AddWithBias("blk.attn_k", {kKey}, {kKeyBias});
      AddWithBias("blk.attn_v", {kValue}, {kValueBias});
    }
    AddWithBias("blk.attn_output", {kAttentionOut}, {kAttentionOutBias});
    AddWithBias("blk.ffn_down", {kFfnDown}, {kFfnDownBias});
  }
  void AddNorms() {
    using enum TensorRole;
    AddWithBias("blk.attn_norm", {kAttentionNorm}, {kAttentionNormBias});
    AddWithBias("blk.ffn_norm", {kFfnNorm}, {kFfnNormBias});
  }
  void AddFfn() {
    using enum TensorRole;
    Add("blk.ffn_gate.weight", {kFfnGate});
    AddWithBias("blk.ffn_up", {kFfnUp}, {kFfnUpBias});
  }

  // Opens the file; every role of the folder must be in it, with its values.
  std::unique_ptr<ModelFile> OpenAndCompare(float norms_added = 0) {
    const std::string path = dir_.path() + "/model.gguf";
    writer.Write(path);
    auto gguf = OpenModelFile(path, {});
    EXPECT_THAT(gguf, IsOk());
    if (!gguf.ok()) return nullptr;
    for (int i = 0; i <= static_cast<int>(TensorRole::kFfnDownBias); ++i) {
      const auto role = static_cast<TensorRole>(i);
      for (uint32_t layer = 0; layer < model_->config().num_layers; ++layer) {
        CompareTensor(**gguf, role, layer, norms_added);
      }
    }
    CompareConfig((*gguf)->config());
    return *std::move(gguf);
  }

  const ModelConfig& config() const { return model_->config(); }
  GgufWriter writer;

 private:
  void CompareTensor(const ModelFile& gguf, TensorRole role, uint32_t layer,
                     float norms_added) {
    const auto expected = model_->Tensor(role, layer);
    const auto found = gguf.Tensor(role, layer);
    ASSERT_EQ(found.ok(), expected.ok())
        << arch_ << " role " << static_cast<int>(role);
    if (!found.ok()) return;
    ASSERT_EQ(found->rows, expected->rows);
    ASSERT_EQ(found->cols, expected->cols);
    std::vector<float> a(found->cols), b(found->cols);
    for (uint64_t r = 0; r < found->rows; ++r) {
      DequantizeRow(*found, r, a);
      DequantizeRow(*expected, r, b);
      if (found->rows == 1 && found->name.find("norm") != std::string::npos) {
        for (float& v : b) v += norms_added;
      }
      ASSERT_EQ(a, b) << found->name << " row " << r;
    }
  }
  void CompareConfig(const ModelConfig& found) {
    const ModelConfig& c = model_->config();
    EXPECT_EQ(found.architecture, arch_);
    EXPECT_EQ(found.num_kv_heads, c.num_kv_heads);
    EXPECT_EQ(found.head_dim, c.head_dim);
    EXPECT_EQ(found.vocab_size, c.vocab_size);
    EXPECT_EQ(found.tied_embeddings, c.tied_embeddings);
    EXPECT_EQ(found.rope.dims, c.rope.dims);
    EXPECT_EQ(found.rope.pairing, RopePairing::kHalfSplit);
    EXPECT_EQ(found.positions, c.positions);
    EXPECT_EQ(found.norm, c.norm);
    EXPECT_EQ(found.activation, c.activation);
    EXPECT_EQ(found.gated_ffn, c.gated_ffn);
    EXPECT_EQ(found.residual, c.residual);
    EXPECT_EQ(found.shared_parallel_norm, c.shared_parallel_norm);
    EXPECT_EQ(found.qk_norm, c.qk_norm);
    EXPECT_EQ(found.post_norms, c.post_norms);
    EXPECT_EQ(found.layer_windows, c.layer_windows);
    EXPECT_EQ(found.local_rope_theta, c.local_rope_theta);
    EXPECT_EQ(found.embedding_scale, c.embedding_scale);
    EXPECT_EQ(found.alibi_max_bias, c.alibi_max_bias);
  }

  const std::string arch_;
  std::unique_ptr<ModelFile> model_;
  TempDir dir_;
};

TEST(GgufFamiliesTest, Qwen2) {
  Converter c("tiny-qwen2", "qwen2");
  c.AddCommon(false);
  c.AddNorms();
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, Qwen3) {
  Converter c("tiny-qwen3", "qwen3");
  c.AddCommon(false);
  c.AddNorms();
  c.AddFfn();
  c.Add("blk.attn_q_norm.weight", {TensorRole::kQueryNorm});
  c.Add("blk.attn_k_norm.weight", {TensorRole::kKeyNorm});
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, Gemma3HasTheOneInItsNorms) {
  using enum TensorRole;
  Converter c("later/tiny-gemma3-text", "gemma3");
  c.Set("attention.sliding_window", 16);
  c.Set("attention.sliding_window_pattern", 3);
  c.Add("token_embd.weight", {kTokenEmbedding});
  c.Add("output_norm.weight", {kOutputNorm}, 1);
  c.Add("blk.attn_norm.weight", {kAttentionNorm}, 1);
  c.Add("blk.ffn_norm.weight", {kFfnNorm}, 1);
  c.Add("blk.post_attention_norm.weight", {kPostAttentionNorm}, 1);
  c.Add("blk.post_ffw_norm.weight", {kPostFfnNorm}, 1);
  c.Add("blk.attn_q_norm.weight", {kQueryNorm}, 1);
  c.Add("blk.attn_k_norm.weight", {kKeyNorm}, 1);
  c.Add("blk.attn_q.weight", {kQuery});
  c.Add("blk.attn_k.weight", {kKey});
  c.Add("blk.attn_v.weight", {kValue});
  c.Add("blk.attn_output.weight", {kAttentionOut});
  c.AddFfn();
  c.Add("blk.ffn_down.weight", {kFfnDown});
  const auto model = c.OpenAndCompare(1);
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->config().norm_weight_offset, 0.0f);
}

TEST(GgufFamiliesTest, Phi3) {
  using enum TensorRole;
  Converter c("later/tiny-phi3", "phi3");
  c.Set("attention.sliding_window", 512);  // its context: none
  c.AddCommon(true);
  c.AddNorms();
  c.Add("blk.ffn_up.weight", {kFfnGate, kFfnUp});
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, FalconWithOneNorm) {
  Converter c("later/tiny-falcon", "falcon");
  c.writer.SetString("falcon.tensor_data_layout", "jploski");
  c.AddCommon(true);
  c.AddNorms();
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, FalconWithTwoNorms) {
  using enum TensorRole;
  Converter c("later/tiny-falcon-new", "falcon");
  c.AddCommon(true);
  c.AddWithBias("blk.attn_norm", {kFfnNorm}, {kFfnNormBias});
  c.AddWithBias("blk.attn_norm_2", {kAttentionNorm}, {kAttentionNormBias});
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, Mpt) {
  Converter c("later/tiny-mpt", "mpt");
  c.writer.SetFloat("mpt.attention.max_alibi_bias", 8);
  c.AddCommon(true);
  c.AddNorms();
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, GptNeox) {
  Converter c("later/tiny-gptneox", "gptneox");
  c.writer.SetBool("gptneox.use_parallel_residual", true);
  c.AddCommon(true);
  c.AddNorms();
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

TEST(GgufFamiliesTest, Gpt2) {
  Converter c("later/tiny-gpt2", "gpt2");
  c.AddCommon(true);
  c.AddNorms();
  c.AddFfn();
  ASSERT_NE(c.OpenAndCompare(), nullptr);
}

absl::StatusOr<std::unique_ptr<ModelFile>> OpenWriter(
    const GgufWriter& writer) {
  const TempDir dir;
  writer.Write(dir.path() + "/model.gguf");
  return OpenModelFile(dir.path() + "/model.gguf", {});
}

TEST(GgufRopeScalingTest, LinearAndYarn) {
  GgufWriter writer = TinyLlama({.layers = 1});
  writer.SetString("llama.rope.scaling.type", "linear")
      .SetFloat("llama.rope.scaling.factor", 4);
  auto model = OpenWriter(writer);
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().rope.scaling.kind, RopeScalingKind::kLinear);
  EXPECT_EQ((*model)->config().rope.scaling.factor, 4.0f);
  writer.SetString("llama.rope.scaling.type", "yarn")
      .SetUint32("llama.rope.scaling.original_context_length", 512);
  model = OpenWriter(writer);
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().rope.scaling.kind, RopeScalingKind::kYarn);
  EXPECT_EQ((*model)->config().rope.scaling.original_context, 512u);
  EXPECT_EQ((*model)->config().rope.scaling.attention_factor, 0.0f);
}

TEST(GgufRopeScalingTest, Llama3ByDivisors) {
  GgufWriter writer = TinyLlama({.layers = 1});
  const std::vector<float> divisors = {1, 1, 1, 1.5, 3, 8, 8, 8};
  writer.AddTensor("rope_freqs.weight", TensorType::kF32, 1, 8, divisors);
  auto model = OpenWriter(writer);
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().rope.scaling.kind, RopeScalingKind::kLlama3);
  EXPECT_EQ((*model)->config().rope.scaling.divisors, divisors);
  const std::vector<float> bad = {1, 1, 1, 0, 3, 8, 8, 8};
  writer.RemoveTensor("rope_freqs.weight");
  writer.AddTensor("rope_freqs.weight", TensorType::kF32, 1, 8, bad);
  EXPECT_THAT(OpenWriter(writer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"rope_freqs.weight\": 0 is not")));
}

TEST(Gemma3Test, OpensFromItsFile) {
  if (Gemma3Path().empty()) {
    GTEST_SKIP() << "no Gemma 3: tools/fetch_model --gemma3";
  }
  const auto model = OpenModelFile(Gemma3Path(), {});
  PC_ASSERT_OK(model);
  const ModelConfig& c = (*model)->config();
  EXPECT_EQ(c.num_layers, 18u);
  EXPECT_EQ(c.hidden_dim, 640u);
  EXPECT_EQ(c.num_heads, 4u);
  EXPECT_EQ(c.num_kv_heads, 1u);
  EXPECT_EQ(c.head_dim, 256u);
  EXPECT_EQ(c.vocab_size, 262144u);
  ASSERT_THAT(c.layer_windows, SizeIs(18));
  EXPECT_EQ(c.layer_windows[4], 512u);
  EXPECT_EQ(c.layer_windows[5], 0u);
  EXPECT_EQ(c.rope.theta, 1e6f);
  EXPECT_EQ(c.local_rope_theta, 10000.0f);
  const auto down = (*model)->Tensor(TensorRole::kFfnDown, 3);
  PC_ASSERT_OK(down);
  std::vector<float> row(down->cols);
  DequantizeRow(*down, 5, row);
  EXPECT_THAT(row, Each(::testing::AllOf(::testing::Gt(-4), ::testing::Lt(4))));
}

}  // namespace
}  // namespace promptcache::worker
