// The engine against the oracle, on small random models: plans of every shape.
//
// The oracle has the engine's bf16 weights; what differs is bf16 keys and
// values, fp32 sums and, with AVX-512 BF16, activations rounded to bf16 for
// the products. Logits of these models are of the order of 1.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "inference_worker/engine/private_span.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/support/oracle_tolerance.h"
#include "tests/support/reference_plan.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using Plan = std::vector<ReferenceItem>;
using Segments = std::vector<ReferenceSegment>;

// Logits of all fresh tokens, computed as a worker does without the cache.
std::vector<float> RunPlan(Backend& backend, const Segments& segments,
                           const Plan& plan) {
  auto pool = Pool(backend);
  std::vector<PrivateSpan> encoded;
  encoded.reserve(segments.size());
  std::vector<float> logits;
  for (const ReferenceSegment& s : segments) {
    std::vector<KvView> context;
    for (const size_t c : s.context) {
      context.push_back(encoded[c].PlacedAt(segments[c].encode_start));
    }
    PC_EXPECT_OK(
        encoded.emplace_back(*pool, s.encode_start)
            .Run(backend, s.tokens, context, LogitsWanted::kNone, &logits));
  }
  std::vector<PrivateSpan> fresh;
  fresh.reserve(plan.size());
  std::vector<KvView> seen;
  std::vector<float> all;
  for (const ReferenceItem& item : plan) {
    if (item.segment >= 0) {
      seen.push_back(
          encoded[static_cast<size_t>(item.segment)].PlacedAt(item.start));
      continue;
    }
    PrivateSpan& span = fresh.emplace_back(*pool, item.start);
    PC_EXPECT_OK(
        span.Run(backend, item.tokens, seen, LogitsWanted::kAll, &logits));
    all.insert(all.end(), logits.begin(), logits.end());
    seen.push_back(span.PlacedAt(item.start));
  }
  return all;
}

double RelativeError(const std::vector<float>& logits,
                     const std::vector<std::vector<double>>& expected) {
  double error = 0;
  double scale = 0;
  size_t i = 0;
  for (const std::vector<double>& row : expected) {
    for (const double e : row) {
      const double difference = static_cast<double>(logits.at(i++)) - e;
      error += difference * difference;
      scale += e * e;
    }
  }
  EXPECT_EQ(i, logits.size());
  return std::sqrt(error / scale);
}

struct ModelAndKernels {
  std::string name;
  TinyLlamaSpec spec;
};

class EngineOracleTest : public ::testing::TestWithParam<
                             std::tuple<ModelAndKernels, std::string>> {
 protected:
  void SetUp() override {
    const auto& [model, kernels] = GetParam();
    const auto file = TinyModelFile(model.spec);
    oracle_ = *ReferenceModel::Create(*file);
    backend_ = TinyBackend({.spec = model.spec, .kernels = kernels});
  }

  double ErrorOf(const Segments& segments, const Plan& plan,
                 const Plan& oracle_plan) {
    return RelativeError(RunPlan(*backend_, segments, plan),
                         RunReferencePlan(*oracle_, segments, oracle_plan));
  }
  void ExpectAgreement(const Segments& segments, const Plan& plan) {
    // Not above it: NaN fails.
    EXPECT_LT(ErrorOf(segments, plan, plan), kOracleTolerance);
  }

  std::vector<int32_t> Ids(size_t count, uint32_t seed) const {
    return RandomIds(count, seed, backend_->vocab_size());
  }
  // A preamble of 7 tokens and two modules that saw it.
  Segments ThreeSegments() const {
    return {{.tokens = Ids(7, 1), .encode_start = 0},
            {.tokens = Ids(40, 2), .encode_start = 7, .context = {0}},
            {.tokens = Ids(21, 3), .encode_start = 7, .context = {0}}};
  }

  std::unique_ptr<ReferenceModel> oracle_;
  std::unique_ptr<Backend> backend_;
};

TEST_P(EngineOracleTest, PlainText) {
  ExpectAgreement({}, {{.tokens = Ids(80, 4)}});
  ExpectAgreement({}, {{.tokens = Ids(1, 5)}});
}

TEST_P(EngineOracleTest, ModulesInAnyOrderAndFreshTextBetween) {
  ExpectAgreement(ThreeSegments(), {{.segment = 0, .start = 0},
                                    {.segment = 2, .start = 7},
                                    {.tokens = Ids(5, 6), .start = 28},
                                    {.segment = 1, .start = 33},
                                    {.tokens = Ids(9, 7), .start = 73}});
}

TEST_P(EngineOracleTest, GapsAndPlacesOutOfOrder) {
  ExpectAgreement(ThreeSegments(), {{.segment = 0, .start = 0},
                                    {.segment = 1, .start = 1200},
                                    {.segment = 2, .start = 100},
                                    {.tokens = Ids(4, 8), .start = 130},
                                    {.tokens = Ids(6, 9), .start = 1300}});
}

TEST_P(EngineOracleTest, TheSameModuleTwiceAndWithoutItsContext) {
  ExpectAgreement(ThreeSegments(), {{.segment = 1, .start = 0},
                                    {.segment = 1, .start = 40},
                                    {.tokens = Ids(8, 10), .start = 80}});
}

TEST_P(EngineOracleTest, AModuleOnePlaceOffIsFarBeyondTheTolerance) {
  Plan plan = {{.segment = 1, .start = 0}, {.tokens = Ids(8, 11), .start = 40}};
  Plan off_by_one = plan;
  off_by_one[1].start = 41;
  EXPECT_GT(ErrorOf(ThreeSegments(), off_by_one, plan), 1.5 * kOracleTolerance);
}

const std::vector<ModelAndKernels> kModels = {
    {"Odd", OddSpec()},
    {"OneHead",
     {.layers = 1,
      .heads = 1,
      .kv_heads = 1,
      .head_dim = 16,
      .hidden = 32,
      .ffn = 64,
      .tied_embeddings = false}},
    {"PartialRotary",
     {.heads = 4,
      .kv_heads = 4,
      .head_dim = 48,
      .hidden = 64,
      .ffn = 96,
      .rope_dims = 32,
      .rope_theta = 500.0f,
      .norm_epsilon = 1e-3f}},
    {"Quantised",
     {.heads = 8,
      .kv_heads = 2,
      .head_dim = 16,
      .hidden = 128,
      .ffn = 256,
      .type = TensorType::kQ4_1,
      .embedding_type = TensorType::kQ8_0}},
    {"WideHeads",
     {.heads = 3,
      .kv_heads = 1,
      .head_dim = 128,
      .hidden = 64,
      .ffn = 64,
      .type = TensorType::kF32,
      .embedding_type = TensorType::kF16}},
};

std::vector<ModelAndKernels> ModelsThatRunHere() {
  std::vector<ModelAndKernels> models;
  for (const ModelAndKernels& model : kModels) {
    if (TestBackendsHave(model.spec.head_dim)) models.push_back(model);
  }
  return models;
}

INSTANTIATE_TEST_SUITE_P(
    All, EngineOracleTest,
    ::testing::Combine(::testing::ValuesIn(ModelsThatRunHere()),
                       ::testing::ValuesIn(TestBackends())),
    [](const auto& test) {
      return std::get<0>(test.param).name + "_" + std::get<1>(test.param);
    });

}  // namespace
}  // namespace promptcache::worker
