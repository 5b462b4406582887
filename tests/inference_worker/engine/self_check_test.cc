#include "inference_worker/engine/self_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "inference_worker/cpu/kernels.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

// A model whose modules come out `error` places from where they are put, when
// that is not where they were encoded.
class MisplacingBackend final : public Backend {
 public:
  MisplacingBackend(Backend& model, int32_t error)
      : model_(model), error_(error) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override {
    std::vector<KvView> views;
    std::vector<RowGroup> moved(groups.begin(), groups.end());
    for (const RowGroup& group : groups) {
      views.insert(views.end(), group.visible.begin(), group.visible.end());
    }
    size_t next = 0;
    for (RowGroup& group : moved) {
      const size_t count = group.visible.size();
      group.visible = std::span(views).subspan(next, count);
      next += count;
    }
    for (KvView& view : views) {
      if (view.position_offset != 0) view.position_offset += error_;
    }
    return model_.Forward(moved, logits);
  }
  const KvLayout& layout() const override { return model_.layout(); }
  uint32_t vocab_size() const override { return model_.vocab_size(); }
  uint32_t context_length() const override { return model_.context_length(); }
  const std::string& numerics() const override { return model_.numerics(); }
  uint32_t num_threads() const override { return model_.num_threads(); }

 private:
  Backend& model_;
  const int32_t error_;
};

class SelfCheckTest : public ::testing::TestWithParam<std::string> {};

TEST_P(SelfCheckTest, ASoundModelPasses) {
  const auto backend = TinyBackend({.kernels = GetParam()});
  const auto pool = Pool(*backend);
  const auto errors = CheckReuse(*backend, *pool, ReuseRule::kAnywhere);
  PC_ASSERT_OK(errors);
  EXPECT_TRUE(errors->ok()) << errors->ToString();
  EXPECT_GT(errors->in_place, 0);
  EXPECT_GT(errors->moved, 0);
  EXPECT_EQ(pool->free_pages(), pool->capacity_pages());
}

TEST_P(SelfCheckTest, AModelThatMisplacesModulesDoesNot) {
  const auto model = TinyBackend({.kernels = GetParam()});
  MisplacingBackend backend(*model, 7);
  const auto pool = Pool(backend);
  const auto errors = CheckReuse(backend, *pool, ReuseRule::kAnywhere);
  PC_ASSERT_OK(errors);
  EXPECT_FALSE(errors->ok()) << errors->ToString();
  EXPECT_THAT(errors->ToString(), ::testing::HasSubstr("moved"));
  // Where modules never move there is nothing to find.
  const auto in_place = CheckReuse(backend, *pool, ReuseRule::kInPlace);
  PC_ASSERT_OK(in_place);
  EXPECT_TRUE(in_place->ok());
  EXPECT_EQ(in_place->moved, 0);
}

// 8-bit activations carry rounding on: other limits.
TEST_P(SelfCheckTest, TellsSoundFromMisplacedWithQuantisedWeightsToo) {
  const auto model = TinyBackend({.spec = QuantizedSpec(),
                                  .kernels = GetParam(),
                                  .numerics = Numerics::kFast});
  const auto pool = Pool(*model);
  const auto sound = CheckReuse(*model, *pool, ReuseRule::kAnywhere);
  PC_ASSERT_OK(sound);
  EXPECT_TRUE(sound->ok()) << sound->ToString();
  for (const int32_t misplaced_by : {1, 7}) {
    MisplacingBackend backend(*model, misplaced_by);
    const auto errors = CheckReuse(backend, *pool, ReuseRule::kAnywhere);
    PC_ASSERT_OK(errors);
    EXPECT_FALSE(errors->ok()) << errors->ToString();
  }
}

TEST(SelfCheckErrorsTest, NotANumberIsAFailure) {
  ReuseErrors errors = {.in_place = std::nan(""), .tolerance = 1};
  EXPECT_FALSE(errors.ok());
  errors = {.moved = std::nan(""), .tolerance = 1};
  EXPECT_FALSE(errors.ok());
}

INSTANTIATE_TEST_SUITE_P(Kernels, SelfCheckTest,
                         ::testing::ValuesIn(cpu::Kernels::Runnable()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace promptcache::worker
