// The real model against values that others computed
// (tests/data/smollm2/README.md), with every set of kernels that runs here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/vector_check.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

class RealModelTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (SmolLm2Path().empty()) GTEST_SKIP() << "the real model is not there";
    Load(Numerics::kExact);
  }

  void Load(Numerics numerics) {
    auto file = OpenModelFile(SmolLm2Path(), {});
    PC_ASSERT_OK(file);
    auto backend =
        CreateCpuBackend(**file, {.kernels = GetParam(), .numerics = numerics});
    PC_ASSERT_OK(backend);
    backend_ = *std::move(backend);
    auto pool = PrivatePages::Create(backend_->layout(), 32 << 20);
    PC_ASSERT_OK(pool);
    pool_ = *std::move(pool);
  }

  void ExpectAllPass(const std::string& json_text) {
    LogitErrors errors;
    auto results = CheckLogitVectors(json_text, *backend_, *pool_, &errors);
    PC_ASSERT_OK(results);
    EXPECT_FALSE(results->empty());
    for (const CaseResult& result : *results) {
      EXPECT_EQ(result.difference, "") << result.name;
    }
    Print(errors);
  }

  void Print(const LogitErrors& errors) const {
    std::printf(
        "%s: logits within %.4f, log-sum-exps within %.4f, mean nll within "
        "%.4f, a token's nll within %.4f; %lu of %lu choices differ, margins "
        "up to %.4f\n",
        backend_->numerics().c_str(), errors.max_logit, errors.max_logsumexp,
        errors.max_mean_nll, errors.max_nll, errors.num_other_choices,
        errors.num_choices, errors.max_margin_of_other);
  }

  // Portable code is there to be right: a few short cases are enough.
  std::string Cases(const char* file, const char* list,
                    std::vector<size_t> portable) const {
    auto json = nlohmann::json::parse(
        ReadFileOrDie(TestDataPath(std::string("smollm2/") + file)));
    if (GetParam() != "portable") return json.dump();
    nlohmann::json some;
    for (const size_t i : portable) some[list].push_back(json[list][i]);
    return some.dump();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<PrivatePages> pool_;
};

TEST_P(RealModelTest, PlainTexts) {
  ExpectAllPass(Cases("vectors.json", "vectors", {4, 7}));
}

TEST_P(RealModelTest, ModularPlans) {
  ExpectAllPass(Cases("modular.json", "cases", {7}));
}

// Activations of 8 bits: not within the limits of exact arithmetic, so with
// limits of their own. Greedy choices agree but for near ties.
TEST_P(RealModelTest, FastNumericsAreNear) {
  Load(Numerics::kFast);
  for (const std::string& json : {Cases("vectors.json", "vectors", {4, 7}),
                                  Cases("modular.json", "cases", {7})}) {
    LogitErrors errors;
    PC_ASSERT_OK(CheckLogitVectors(json, *backend_, *pool_, &errors));
    Print(errors);
    EXPECT_LT(errors.max_mean_nll, 0.05);
    EXPECT_LT(errors.max_margin_of_other, 0.5);
    // 4 % of all choices of these files are others; of 48, as many as three.
    EXPECT_LT(static_cast<double>(errors.num_other_choices),
              0.08 * static_cast<double>(errors.num_choices));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, RealModelTest,
                         ::testing::ValuesIn(cpu::Kernels::Runnable()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace promptcache::worker
