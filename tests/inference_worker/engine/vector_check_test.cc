#include "inference_worker/engine/vector_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/engine/sampler.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/support/reference_plan.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;
using Row = std::vector<double>;

std::vector<float> Floats(const Row& row) { return {row.begin(), row.end()}; }

double LogSumExp(const Row& row) {
  double sum = 0;
  for (const double x : row) sum += std::exp(x);
  return std::log(sum);
}

// Files as their README says them, of the tiny model, by the oracle.
class TinyVectors {
 public:
  TinyVectors() : model_(*ReferenceModel::Create(*TinyModelFile())) {}

  Json Plain() const {
    const std::vector<int32_t> ids = RandomIds(90, 1);
    const auto logits = model_->Run(TokensAt(ids, 0), {}).logits;
    Json c = Outcome({}, {{.tokens = ids}}, logits);
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      c["nll"].push_back(LogSumExp(logits[i]) -
                         logits[i][static_cast<size_t>(ids[i + 1])]);
    }
    c["ids"] = ids;
    c["argmax"] = Argmaxes(logits);
    c["margin"] = Margins(logits);
    c["logsumexp_last"] = LogSumExp(logits.back());
    return {{"vectors", {c}}};
  }

  Json Modular() const {
    const std::vector<ReferenceSegment> segments = {
        {.tokens = RandomIds(6, 2), .encode_start = 0},
        {.tokens = RandomIds(20, 3), .encode_start = 6, .context = {0}}};
    const std::vector<ReferenceItem> plan = {
        {.segment = 0, .start = 0},
        {.tokens = RandomIds(4, 4), .start = 6},
        {.segment = 1, .start = 30},
        {.segment = 1, .start = 50},
        {.tokens = RandomIds(5, 5), .start = 70}};
    const auto logits = RunReferencePlan(*model_, segments, plan);
    Json c = Outcome(segments, plan, logits);
    for (const ReferenceSegment& s : segments) {
      c["segments"].push_back({{"ids", s.tokens},
                               {"encode_start", s.encode_start},
                               {"context", s.context}});
    }
    for (const ReferenceItem& item : plan) {
      Json p = {{"start", item.start}};
      if (item.segment >= 0) p["segment"] = item.segment;
      if (item.segment < 0) p["fresh"] = item.tokens;
      c["plan"].push_back(p);
    }
    c["fresh_argmax"] = Argmaxes(logits);
    c["fresh_margin"] = Margins(logits);
    for (const Row& row : logits) {
      c["fresh_logsumexp"].push_back(LogSumExp(row));
    }
    return {{"cases", {c}}};
  }

 private:
  Json Outcome(const std::vector<ReferenceSegment>& segments,
               std::vector<ReferenceItem> plan,
               const std::vector<Row>& logits) const {
    Json c = {{"name", "tiny"}};
    std::vector<float> last = Floats(logits.back());
    for (const auto& [id, logprob] : TopLogprobs(last, 40)) {
      c["top_last"]["ids"].push_back(id);
      c["top_last"]["logits"].push_back(logits.back()[static_cast<size_t>(id)]);
    }
    for (int i = 0; i < 6; ++i) {
      c["greedy"]["new_ids"].push_back(Argmax(last));
      c["greedy"]["margins"].push_back(Margin(last));
      plan.back().tokens.push_back(Argmax(last));
      last = Floats(RunReferencePlan(*model_, segments, plan).back());
    }
    return c;
  }
  static Json Argmaxes(const std::vector<Row>& logits) {
    Json ids;
    for (const Row& row : logits) ids.push_back(Argmax(Floats(row)));
    return ids;
  }
  static Json Margins(const std::vector<Row>& logits) {
    Json margins;
    for (const Row& row : logits) margins.push_back(Margin(Floats(row)));
    return margins;
  }

  std::unique_ptr<ReferenceModel> model_;
};

class TinyVectorCheckTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    plain_ = new Json(TinyVectors().Plain());
    modular_ = new Json(TinyVectors().Modular());
  }
  static void TearDownTestSuite() {
    delete plain_;
    delete modular_;
  }

  std::string Difference(const Json& json, LogitErrors* errors = nullptr) {
    auto results = CheckLogitVectors(json.dump(), *backend_, *pool_, errors);
    PC_EXPECT_OK(results);
    EXPECT_EQ(results->size(), 1u);
    EXPECT_EQ(results->at(0).name, "tiny");
    EXPECT_EQ(pool_->free_pages(), pool_->capacity_pages());
    return results->at(0).difference;
  }

  static inline Json* plain_ = nullptr;
  static inline Json* modular_ = nullptr;
  std::unique_ptr<Backend> backend_ = TinyBackend();
  std::unique_ptr<PrivatePages> pool_ = Pool(*backend_);
};

TEST_F(TinyVectorCheckTest, TheOraclesValuesPassInBothFormats) {
  LogitErrors errors;
  EXPECT_EQ(Difference(*plain_, &errors), "");
  EXPECT_GT(errors.num_choices, 90u);
  EXPECT_GT(errors.max_nll, 0);
  EXPECT_LE(errors.max_margin_of_other, LogitLimits::Published().margin);
  EXPECT_EQ(Difference(*modular_, &errors), "");
  EXPECT_GT(errors.max_logit, 0);
}

struct Alteration {
  const char* pointer;
  Json value;
  const char* message;
};

TEST_F(TinyVectorCheckTest, NamesTheFirstDifferenceOfAPlainText) {
  const double nll = plain_->at("vectors")[0]["nll"][7];
  const Alteration alterations[] = {
      {"/argmax/12", 332, "argmax after token 12 is"},
      {"/nll/7", nll + 9, "mean nll is"},
      {"/top_last/logits/3", 99.5, "expected 99.5"},
      {"/logsumexp_last", -3, "log-sum-exp after the last token"},
      {"/greedy/new_ids/0", 332, "greedy token 0 is"},
      {"/ids/5", 333, "the vocabulary has no token 333"},
      {"/top_last/ids/1", -7, "the vocabulary has no token -7"},
  };
  for (const Alteration& a : alterations) {
    Json json = *plain_;
    Json& c = json["vectors"][0];
    c["margin"][12] = 1.0;
    c["greedy"]["margins"][0] = 1.0;
    c[Json::json_pointer(a.pointer)] = a.value;
    EXPECT_THAT(Difference(json), HasSubstr(a.message)) << a.pointer;
  }
}

TEST_F(TinyVectorCheckTest, NamesTheFirstDifferenceOfAPlan) {
  for (const char* place : {"/plan/3/start", "/plan/2/start"}) {
    Json json = *modular_;
    json["cases"][0][Json::json_pointer(place)] = 1;
    EXPECT_THAT(Difference(json), HasSubstr("after token ")) << place;
  }
  Json json = *modular_;
  json["cases"][0]["segments"][1]["context"] = Json::array();
  EXPECT_THAT(Difference(json), HasSubstr("after token "));
}

TEST_F(TinyVectorCheckTest, ChoicesBelowTheMarginAreNotCompared) {
  Json json = *plain_;
  json["vectors"][0]["argmax"][12] = 332;
  json["vectors"][0]["margin"][12] = 0.25;
  // The last one: those after it would be of another text.
  json["vectors"][0]["greedy"]["new_ids"][5] = 332;
  json["vectors"][0]["greedy"]["margins"][5] = 0.25;
  LogitErrors errors;
  EXPECT_EQ(Difference(json, &errors), "");
  EXPECT_GE(errors.num_other_choices, 1u);
}

TEST_F(TinyVectorCheckTest, APoolTooSmallIsAnError) {
  const auto pool = Pool(*backend_, 3);
  EXPECT_THAT(CheckLogitVectors(plain_->dump(), *backend_, *pool),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("private KV pages")));
}

}  // namespace
}  // namespace promptcache::worker
