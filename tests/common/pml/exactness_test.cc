// What EXACT promises, held against a model: a plan whose states come from
// modules, each computed seeing its context only, gives the logits of full
// attention over the same tokens, and a MODULAR plan does not. A context that
// forgets something, or counts a distance wrong, fails here.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "inference_worker/model/model_file.h"
#include "tests/common/pml/pml_fixture.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/reference_model.h"
#include "tests/support/reference_plan.h"
#include "tests/support/test_files.h"

namespace promptcache::pml {
namespace {

class ExactnessTest : public testing::Test {
 protected:
  ExactnessTest() {
    const std::string path = dir_.path() + "/tiny.gguf";
    worker::WriteTinyLlama(path);
    auto file = worker::OpenModelFile(path, {});
    EXPECT_THAT(file, IsOk());
    auto model = worker::ReferenceModel::Create(**file);
    EXPECT_THAT(model, IsOk());
    model_ = *std::move(model);
  }

  // The greatest difference between a logit of the plan and of full attention.
  double Difference(const Plan& plan) const {
    Plan full;
    full.spans.emplace_back();
    std::vector<size_t> fresh;
    for (const PlanSpan& span : plan.spans) {
      for (const int32_t id : span.tokens) {
        if (span.kind == SpanKind::kFresh) {
          fresh.push_back(full.spans[0].tokens.size());
        }
        full.spans[0].tokens.push_back(id);
      }
    }
    if (plan.spans.back().kind == SpanKind::kCached) {
      fresh.push_back(full.spans[0].tokens.size() - 1);
    }
    const auto expected = worker::RunReferencePlan(*model_, full);
    const auto actual = worker::RunReferencePlan(*model_, plan);
    EXPECT_EQ(actual.size(), fresh.size());
    double difference = 0;
    for (size_t row = 0; row < actual.size(); ++row) {
      for (size_t i = 0; i < actual[row].size(); ++i) {
        difference = std::max(
            difference, std::abs(actual[row][i] - expected[fresh[row]][i]));
      }
    }
    return difference;
  }

 private:
  TempDir dir_;
  std::unique_ptr<worker::ReferenceModel> model_;
};

TEST_F(ExactnessTest, OfThePublishedCasesIsWhatAModelComputes) {
  const auto file =
      nlohmann::json::parse(ReadFileOrDie(TestDataPath("pml/cases.json")));
  int exact = 0;
  int modular = 0;
  for (const auto& c : file["cases"]) {
    CompileOptions options;
    if (c.value("layout", "") == "schema") options.layout = Layout::kSchema;
    const auto plan = TryCompile(c["schema"].get<std::string>(),
                                 c["prompt"].get<std::string>(), options);
    if (!plan.ok() || plan->spans.empty()) continue;
    const double difference = Difference(*plan);
    if (plan->exactness == Exactness::kExact) {
      ++exact;
      EXPECT_LT(difference, 1e-9) << c["name"];
    } else if (plan->num_cached_tokens > 0) {  // else only positions differ
      ++modular;
      EXPECT_GT(difference, 1e-9) << c["name"];
    }
  }
  EXPECT_GT(exact, 30);
  EXPECT_GT(modular, 30);
}

// The deepest chain: parents, scaffold texts in their slots, taken as given.
TEST_F(ExactnessTest, OfAChainOfParentsAndSlotsThatAreFull) {
  const char* schema =
      "<schema name='s'>PR<module name='a'>A1<param name='p' length='2' "
      "scaffold='ps'/>A2<module name='b'>B1<param name='q' length='1' "
      "scaffold='q'/><module name='c'>C<param name='r' length='3' "
      "scaffold='rst'/>C2</module>B2</module>A3</module></schema>";
  const Plan plan =
      PlanOf(schema, "<prompt schema='s'><a p='ps'><b><c/></b></a>x</prompt>");
  // What follows c in its parents did not see it.
  EXPECT_EQ(plan.exactness, Exactness::kModular);
  Plan chain = plan;
  while (chain.spans.back().name != "a/b/c") chain.spans.pop_back();
  EXPECT_LT(Difference(chain), 1e-9);
  EXPECT_GT(Difference(plan), 1e-9);
}

TEST_F(ExactnessTest, OfAScaffoldAfterThePreamble) {
  const std::string schema =
      "<schema name='s'>PR<module name='a'>AAA</module><module name='e'/>"
      "<module name='b'>BB</module><module name='c'>C</module>"
      "<scaffold modules='a e b c'/></schema>";
  const Plan together =
      PlanOf(schema, "<prompt schema='s'><a/><e/><b/><c/>x</prompt>");
  EXPECT_EQ(together.exactness, Exactness::kExact);
  EXPECT_LT(Difference(together), 1e-9);
  const Plan apart =
      PlanOf(schema, "<prompt schema='s'><a/><b/><c/>x</prompt>");
  EXPECT_EQ(apart.exactness, Exactness::kModular);
  EXPECT_GT(Difference(apart), 1e-9);
}

}  // namespace
}  // namespace promptcache::pml
