#include "inference_worker/model/model_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
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
