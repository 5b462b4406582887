#include <gtest/gtest.h>

#include <memory>

#include "common/pml/case_check.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::pml {
namespace {

TEST(PmlCasesTest, EveryPublishedCaseHoldsWithTheRealTokenizer) {
  const std::string path = SmolLm2Path();
  if (path.empty()) GTEST_SKIP() << "no model file: run tools/fetch_model";
  const auto model = worker::OpenModelFile(path, {});
  PC_ASSERT_OK(model);
  const auto tokenizer = worker::CreateTokenizer((*model)->vocabulary());
  PC_ASSERT_OK(tokenizer);
  const auto results =
      CheckPmlCases(ReadFileOrDie(TestDataPath("pml/cases.json")), **tokenizer);
  PC_ASSERT_OK(results);
  EXPECT_EQ(results->size(), 181u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
}

}  // namespace
}  // namespace promptcache::pml
