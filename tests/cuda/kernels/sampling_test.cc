// Choices of the device against the CPU's sampler, which is tested against its
// own definitions (tests/inference_worker/engine/sampler_test.cc).

#include "cuda/kernels/sampling.h"

#include <cmath>
#include <limits>

#include "inference_worker/engine/sampler.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

using worker::Sampler;
using worker::SamplingOptions;

class SamplingTest : public KernelTest {
 protected:
  // One row each: the same logits, options and draws.
  std::vector<int32_t> Choose(const std::vector<std::vector<float>>& logits,
                              const std::vector<SamplingRow>& rows,
                              const std::vector<int32_t>& penalized = {}) {
    std::vector<float> all;
    for (const auto& row : logits)
      all.insert(all.end(), row.begin(), row.end());
    const auto n = static_cast<int32_t>(rows.size());
    const SamplingParams params = {
        .logits = Upload(all),
        .rows = Upload(rows),
        .penalized = Upload(penalized),
        .chosen = Room<int32_t>(rows.size()),
        .num_rows = n,
        .vocab = static_cast<int32_t>(logits.front().size())};
    PC_EXPECT_OK(Launched(LaunchSampling(params, stream_->native())));
    return Download(params.chosen, rows.size());
  }
  static SamplingRow RowOf(const SamplingOptions& o, uint64_t step) {
    return {.temperature = o.temperature,
            .top_k = o.top_k,
            .top_p = o.top_p,
            .min_p = o.min_p,
            .repetition_penalty = o.repetition_penalty,
            .uniform = worker::UniformDraw(o.seed, step)};
  }
  // The same seed, several steps, as the CPU's sampler chooses.
  void CheckAsOnTheCpu(const std::vector<float>& logits,
                       const SamplingOptions& options, size_t steps = 12) {
    Sampler sampler(options);
    std::vector<int32_t> expected;
    std::vector<SamplingRow> rows;
    for (size_t step = 0; step < steps; ++step) {
      expected.push_back(sampler.Sample(logits, {}));
      rows.push_back(RowOf(options, step));
    }
    const std::vector<std::vector<float>> same(steps, logits);
    EXPECT_EQ(Choose(same, rows), expected)
        << "k " << options.top_k << " p " << options.top_p << " min "
        << options.min_p << " of " << logits.size();
  }
};

TEST_F(SamplingTest, GreedyTakesTheBestAndTheLowestIdOfATie) {
  const float never = -std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> logits = {{1, 5, 5, 2, 0},
                                                  {nan, never, 3, nan, 3},
                                                  {nan, nan, nan, nan, nan},
                                                  {-4, -3, -2, -0.0f, 0.0f},
                                                  {1, 2, 3, 4, 1 / 0.0f}};
  EXPECT_EQ(Choose(logits, std::vector<SamplingRow>(5)),
            (std::vector<int32_t>{1, 2, 0, 3, 4}));
}

TEST_F(SamplingTest, AnInfiniteBestIsTakenAtAnyTemperature) {
  const std::vector<SamplingRow> rows(1, {.temperature = 1, .uniform = 0.9});
  EXPECT_EQ(Choose({{1, 1 / 0.0f, 2}}, rows), std::vector<int32_t>{1});
}

TEST_F(SamplingTest, FiltersAndDrawsAsOnTheCpu) {
  for (const size_t vocab : {1u, 2u, 33u, 384u, 5000u}) {
    const std::vector<float> logits = RandomFloats(vocab, 3);
    for (const uint32_t top_k : {0u, 1u, 7u, 40u}) {
      for (const float top_p : {1.0f, 0.9f, 0.3f}) {
        CheckAsOnTheCpu(logits, {.temperature = 0.8f,
                                 .top_k = top_k,
                                 .top_p = top_p,
                                 .seed = vocab + top_k});
      }
    }
    CheckAsOnTheCpu(logits, {.temperature = 1.5f, .min_p = 0.05f, .seed = 3});
    CheckAsOnTheCpu(logits, {.temperature = 0.01f, .seed = 4});
    CheckAsOnTheCpu(logits, {.temperature = 50, .seed = 5});
  }
}

TEST_F(SamplingTest, TiesAtTheBordersGoToTheLowerIds) {
  std::vector<float> logits(300, 1.0f);
  for (size_t i = 0; i < logits.size(); i += 3) logits[i] = 2.0f;
  for (const uint32_t top_k : {5u, 100u, 150u}) {
    CheckAsOnTheCpu(logits, {.temperature = 1, .top_k = top_k, .seed = 9}, 40);
  }
  CheckAsOnTheCpu(logits, {.temperature = 1, .top_p = 0.25f, .seed = 9}, 40);
}

TEST_F(SamplingTest, RepetitionIsPenalised) {
  const std::vector<float> logits = {4, 3.9f, -1, -0.9f};
  // Ids out of range are ignored.
  const std::vector<int32_t> penalized = {0, 77, -3, 3};
  SamplingRow row = {
      .repetition_penalty = 2, .first_penalized = 0, .num_penalized = 3};
  SamplingRow other = {
      .repetition_penalty = 2, .first_penalized = 3, .num_penalized = 1};
  EXPECT_EQ(Choose({logits, logits}, {row, other}, penalized),
            (std::vector<int32_t>{1, 0}));
  Sampler sampler({.repetition_penalty = 2});
  EXPECT_EQ(sampler.Sample(logits, std::vector<int32_t>{0, 77, -3}), 1);
}

// Each token is drawn as often as its share of the weights says.
TEST_F(SamplingTest, DrawsFollowTheWeights) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f),
                                     -std::numeric_limits<float>::infinity()};
  constexpr size_t kDraws = 800;
  std::vector<SamplingRow> rows;
  for (size_t i = 0; i < kDraws; ++i) {
    rows.push_back(
        {.temperature = 1, .uniform = (static_cast<double>(i) + 0.5) / kDraws});
  }
  const auto chosen =
      Choose(std::vector<std::vector<float>>(kDraws, logits), rows);
  EXPECT_EQ(std::count(chosen.begin(), chosen.end(), 0), 100);
  EXPECT_EQ(std::count(chosen.begin(), chosen.end(), 1), 200);
  EXPECT_EQ(std::count(chosen.begin(), chosen.end(), 2), 500);
}

}  // namespace
}  // namespace promptcache::gpu
