// Every model folder of tests/data/models against the values that others
// computed (its README says how, and the limits), on the most portable set of
// kernels and on the fastest that runs here.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "inference_worker/engine/self_check.h"
#include "inference_worker/engine/vector_check.h"
#include "tests/inference_worker/engine/test_backends.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> ModelFolders() {
  std::vector<std::string> folders;
  for (const auto& entry :
       fs::recursive_directory_iterator(TestDataPath("models"))) {
    if (entry.path().filename() == "config.json") {
      folders.push_back(entry.path().parent_path().string());
    }
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

std::vector<std::string> KernelNames() {
  const std::string fastest = TestBackends().front();
  if (TestBackends().size() == 1) return {fastest};
  return {"portable", fastest};
}

std::string NameOf(const std::string& folder) {
  std::string name = fs::path(folder).filename().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class ModelFolderTest
    : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    const auto& [folder, kernels] = GetParam();
    auto file = OpenModelFile(folder, {});
    PC_ASSERT_OK(file);
    config_ = (*file)->config();
    auto backend = MakeTestBackend(**file, {.name = kernels});
    PC_ASSERT_OK(backend);
    backend_ = *std::move(backend);
    pages_ = Pool(*backend_, (16 << 20) / backend_->layout().page_bytes());
  }

  void ExpectAllPass(const char* file) {
    const auto& [folder, kernels] = GetParam();
    LogitErrors errors;
    auto results = CheckLogitVectors(ReadFileOrDie(folder + "/" + file),
                                     *backend_, *pages_, &errors);
    PC_ASSERT_OK(results);
    EXPECT_GE(results->size(), 5u);
    for (const CaseResult& result : *results) {
      EXPECT_EQ(result.difference, "") << result.name;
    }
    std::printf(
        "%s %s %s: rms of a last row %.4f, logits within %.3f, log-sum-exps "
        "within %.4f, %lu of %lu choices differ, margins up to %.3f, rms of "
        "an encoder's output %.4f\n",
        NameOf(folder).c_str(), kernels.c_str(), file, errors.max_last_rms,
        errors.max_logit, errors.max_logsumexp, errors.num_other_choices,
        errors.num_choices, errors.max_margin_of_other, errors.max_encoder_rms);
  }

  ModelConfig config_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<PrivatePages> pages_;
};

TEST_P(ModelFolderTest, PlainTextsAndExplicitPositions) {
  ExpectAllPass("vectors.json");
}

TEST_P(ModelFolderTest, ModularPlans) { ExpectAllPass("modular.json"); }

TEST_P(ModelFolderTest, TheSelfCheckPasses) {
  const auto errors = CheckReuse(*backend_, *pages_, ReuseRuleOf(config_));
  PC_ASSERT_OK(errors);
  EXPECT_TRUE(errors->ok()) << errors->ToString();
}

INSTANTIATE_TEST_SUITE_P(All, ModelFolderTest,
                         ::testing::Combine(::testing::ValuesIn(ModelFolders()),
                                            ::testing::ValuesIn(KernelNames())),
                         [](const auto& test) {
                           return NameOf(std::get<0>(test.param)) + "_" +
                                  std::get<1>(test.param);
                         });

}  // namespace
}  // namespace promptcache::worker
