#include "inference_worker/model/model_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;

class ModelFileTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<ModelFile>> Open(
      const GgufWriter& writer, const OpenOptions& options = {}) {
    writer.Write(path());
    return OpenModelFile(path(), options);
  }
  std::string path() const { return dir_.path() + "/model.gguf"; }

  TempDir dir_;
};

TEST_F(ModelFileTest, ReadsTheConfig) {
  const TinyLlamaSpec spec{.layers = 3, .rope_dims = 8, .rope_theta = 5000.0f};
  const auto model = Open(TinyLlama(spec));
  PC_ASSERT_OK(model);
  const ModelConfig& config = (*model)->config();
  EXPECT_EQ(config.architecture, "llama");
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.num_layers, 3u);
  EXPECT_EQ(config.hidden_dim, 64u);
  EXPECT_EQ(config.num_heads, 4u);
  EXPECT_EQ(config.num_kv_heads, 2u);
  EXPECT_EQ(config.head_dim, 16u);
  EXPECT_EQ(config.ffn_dim, 96u);
  EXPECT_EQ(config.vocab_size, 320u);
  EXPECT_EQ(config.context_length, 2048u);
  EXPECT_EQ(config.norm_epsilon, 1e-5f);
  EXPECT_EQ(config.rope.theta, 5000.0f);
  EXPECT_EQ(config.rope.dims, 8u);
  EXPECT_EQ(config.rope.pairing, RopePairing::kInterleaved);
  EXPECT_TRUE(config.tied_embeddings);
}

TEST_F(ModelFileTest, AnAddedEosEndsATextForEncoders) {
  EXPECT_EQ((*Open(TinyLlama({})))->vocabulary().text_end_id, -1);
  GgufWriter writer = TinyLlama({});
  writer.SetBool("tokenizer.ggml.add_eos_token", true);
  EXPECT_EQ((*Open(writer))->vocabulary().text_end_id, 2);
}

TEST_F(ModelFileTest, AMissingOutputMeansTiedEmbeddings) {
  const auto tied = Open(TinyLlama({.tied_embeddings = true}));
  PC_ASSERT_OK(tied);
  EXPECT_TRUE((*tied)->config().tied_embeddings);
  EXPECT_THAT(
      (*tied)->Tensor(TensorRole::kOutput, 0),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"output.weight\"")));
  const auto untied = Open(TinyLlama({.tied_embeddings = false}));
  PC_ASSERT_OK(untied);
  EXPECT_FALSE((*untied)->config().tied_embeddings);
  PC_EXPECT_OK((*untied)->Tensor(TensorRole::kOutput, 0));
}

TEST_F(ModelFileTest, TensorsAreMatricesInTheFilesOrder) {
  std::vector<float> values(64 * 32);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  GgufWriter writer = TinyLlama({.layers = 1});
  writer.tensor("blk.0.attn_v.weight").type = 0;
  writer.tensor("blk.0.attn_v.weight").bytes =
      EncodeTensor(TensorType::kF32, values);
  const auto model = Open(writer);
  PC_ASSERT_OK(model);
  const auto view = (*model)->Tensor(TensorRole::kValue, 0);
  PC_ASSERT_OK(view);
  EXPECT_EQ(view->name, "blk.0.attn_v.weight");
  EXPECT_EQ(view->rows, 32u);
  EXPECT_EQ(view->cols, 64u);
  std::vector<float> row(64);
  DequantizeRow(*view, 3, row);
  EXPECT_EQ(row[0], 192.0f);
  EXPECT_EQ(row[63], 255.0f);
}

TEST_F(ModelFileTest, NamesTheTensorThatALayerLacks) {
  const auto model = Open(TinyLlama({.layers = 2}));
  PC_ASSERT_OK(model);
  EXPECT_THAT((*model)->Tensor(TensorRole::kKey, 2),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("\"blk.2.attn_k.weight\"")));
}

TEST_F(ModelFileTest, OpensAllSupportedTypes) {
  for (const TensorType type :
       {TensorType::kF32, TensorType::kF16, TensorType::kBf16,
        TensorType::kQ8_0, TensorType::kQ4_0, TensorType::kQ4_1}) {
    const auto model = Open(TinyLlama({.type = type, .embedding_type = type}));
    PC_ASSERT_OK(model) << TensorTypeName(type);
    EXPECT_EQ((*model)->Tensor(TensorRole::kQuery, 0)->type, type);
  }
}

TEST_F(ModelFileTest, DefaultsAreTheFormats) {
  GgufWriter writer = TinyLlama({.kv_heads = 4});
  for (const char* key :
       {"llama.attention.head_count_kv", "llama.attention.key_length",
        "llama.attention.value_length", "llama.rope.freq_base",
        "llama.rope.dimension_count", "llama.vocab_size", "general.name"}) {
    writer.Remove(key);
  }
  const auto model = Open(writer);
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().num_kv_heads, 4u);
  EXPECT_EQ((*model)->config().head_dim, 16u);
  EXPECT_EQ((*model)->config().rope.theta, 10000.0f);
  EXPECT_EQ((*model)->config().rope.dims, 16u);
  EXPECT_EQ((*model)->config().vocab_size, 320u);
}

TEST_F(ModelFileTest, FeaturesThatAreOffAreNoFeatures) {
  PC_EXPECT_OK(Open(TinyLlama({})
                        .SetString("llama.rope.scaling.type", "none")
                        .SetFloat("llama.rope.scaling.factor", 1.0f)
                        .SetUint32("llama.attention.sliding_window", 0)
                        .SetUint32("llama.expert_count", 0)
                        .SetBool("llama.attention.causal", true)
                        .SetUint32("split.count", 1)
                        .SetUint32("general.quantization_version", 2)));
}

// Older files leave it to whoever reads them.
TEST_F(ModelFileTest, TheFamilyAddsBosWhereTheFileDoesNotSay) {
  const auto adds_bos = [&](const char* model, const char* pre_tokenizer) {
    GgufWriter writer = TinyLlama({});
    writer.Remove("tokenizer.ggml.add_bos_token")
        .SetUint32("tokenizer.ggml.bos_token_id", 1)
        .SetString("tokenizer.ggml.model", model)
        .SetString("tokenizer.ggml.pre", pre_tokenizer);
    const auto file = Open(writer, {.vocabulary_only = true});
    EXPECT_THAT(file, IsOk());
    return file.ok() && (*file)->vocabulary().add_bos;
  };
  EXPECT_TRUE(adds_bos("llama", "default"));
  EXPECT_TRUE(adds_bos("gpt2", "llama-bpe"));
  EXPECT_FALSE(adds_bos("gpt2", "qwen2"));
  EXPECT_FALSE(adds_bos("gpt2", "gpt-2"));
}

TEST_F(ModelFileTest, VersionTwoIsReadAsWell) {
  std::string bytes = TinyLlama({}).Serialize();
  bytes[4] = 2;
  WriteFileOrDie(path(), bytes);
  PC_EXPECT_OK(OpenModelFile(path(), {}));
}

TEST_F(ModelFileTest, AVocabularyOpensWhateverTheModelIs) {
  GgufWriter writer = TinyLlama({});
  writer.SetString("general.architecture", "something-else");
  writer.tensor("blk.0.ffn_up.weight").type = 12;
  EXPECT_THAT(Open(writer), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("\"something-else\"")));
  const auto model = Open(writer, {.vocabulary_only = true});
  PC_ASSERT_OK(model);
  EXPECT_EQ((*model)->config().architecture, "something-else");
  EXPECT_EQ((*model)->config().vocab_size, 320u);
  EXPECT_EQ((*model)->vocabulary().tokens[2], "<|im_end|>");
  EXPECT_EQ((*model)->vocabulary().token_types[2], 3);
  EXPECT_EQ((*model)->vocabulary().eos_id, 2);
  EXPECT_EQ((*model)->vocabulary().eot_id, -1);
  EXPECT_THAT((*model)->Tensor(TensorRole::kQuery, 0),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("vocabulary")));
}

TEST_F(ModelFileTest, ReadsTheRealModel) {
  const std::string path = SmolLm2Path();
  if (path.empty()) GTEST_SKIP() << "no model: run tools/fetch_model";
  const auto model = OpenModelFile(path, {});
  PC_ASSERT_OK(model);
  const ModelConfig& config = (*model)->config();
  EXPECT_EQ(config.num_layers, 30u);
  EXPECT_EQ(config.hidden_dim, 576u);
  EXPECT_EQ(config.num_heads, 9u);
  EXPECT_EQ(config.num_kv_heads, 3u);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.ffn_dim, 1536u);
  EXPECT_EQ(config.vocab_size, 49152u);
  EXPECT_EQ(config.context_length, 8192u);
  EXPECT_EQ(config.rope.theta, 100000.0f);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ((*model)->vocabulary().pre_tokenizer, "smollm");
  EXPECT_EQ((*model)->vocabulary().merges.size(), 48900u);
  EXPECT_THAT((*model)->chat_template(), HasSubstr("<|im_start|>"));
  const auto down = (*model)->Tensor(TensorRole::kFfnDown, 29);
  PC_ASSERT_OK(down);
  EXPECT_EQ(down->type, TensorType::kQ4_1);
  EXPECT_EQ(down->rows, 576u);
  EXPECT_EQ(down->cols, 1536u);
}

}  // namespace
}  // namespace promptcache::worker
