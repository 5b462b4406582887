// Other files than the package's, through the real programs.
#include <gmock/gmock.h>

#include <filesystem>

#include "inference_worker/model/model_file.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/hf_writer.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

constexpr char kSchema[] =
    "<schema name=\"clerk\">The library's rules.\n"
    "<module name=\"hours\">The library opens at nine in the morning and "
    "closes at five in the afternoon. On Friday it closes at noon.\n</module>"
    "<module name=\"loans\">A reader may borrow three books for two weeks."
    "\n</module></schema>";
constexpr char kPrompt[] =
    "<prompt schema=\"clerk\"><loans/><hours/>In one sentence, the rules "
    "say that</prompt>";

class ModelFilesTest : public NodeTest {
 protected:
  // The answer over cached modules, which is checked against the one without.
  Answer Serve(const std::string& model, uint32_t max_tokens,
               const std::vector<std::string>& worker_args = {}) {
    UseModelFile(model);
    const auto worker = StartWorker(worker_args);
    WaitAttached(worker.get());
    PC_EXPECT_OK(worker->PutSchema(kSchema));
    const auto request = Request(kPrompt, max_tokens);
    const Answer bypass = worker->Generate(Bypass(request));
    const Answer created = worker->Generate(request);
    Answer cached = worker->Generate(request);
    PC_EXPECT_OK(bypass.status);
    PC_EXPECT_OK(created.status);
    PC_EXPECT_OK(cached.status);
    EXPECT_FALSE(cached.text.empty());
    EXPECT_EQ(cached.text, bypass.text);
    EXPECT_EQ(cached.completed.logits_sha256(),
              bypass.completed.logits_sha256());
    EXPECT_GT(cached.usage().cached_tokens(), 30u);
    EXPECT_EQ(cached.usage().created_tokens(), 0u);
    return cached;
  }
};

TEST_F(ModelFilesTest, TheSameWeightsAsAFolderGiveTheSameText) {
  if (SmolLm2Path().empty()) {
    GTEST_SKIP() << "the real model is not there: run tools/fetch_model";
  }
  const std::string folder = dir() + "/folder";
  std::filesystem::create_directory(folder);
  const auto model = worker::OpenModelFile(SmolLm2Path(), {});
  PC_ASSERT_OK(model);
  PC_ASSERT_OK(worker::WriteHfFolder(**model, folder));
  StartDaemon({"--device_bytes=64MiB"});
  // The folder's weights are not quantised any more.
  const Answer from_gguf = Serve(SmolLm2Path(), 48, {"--numerics=exact"});
  const Answer from_folder = Serve(folder, 48);
  EXPECT_EQ(from_folder.text, from_gguf.text);
  EXPECT_EQ(from_folder.ids, from_gguf.ids);
}

TEST_F(ModelFilesTest, Gemma3AnswersFromItsGguf) {
  if (Gemma3Path().empty()) {
    GTEST_SKIP() << "Gemma 3 is not there: run tools/fetch_model --gemma3";
  }
  StartDaemon({"--device_bytes=64MiB"});
  const Answer answer = Serve(Gemma3Path(), 16);
  std::printf("Gemma 3 270M: %s\n", answer.text.c_str());
}

}  // namespace
}  // namespace promptcache::e2e
