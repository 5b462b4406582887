// The attention kernels against a plain evaluation in double precision.
#include <tuple>

#include "attention_case.h"
#include "attention_sweep.h"
#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

void ExpectRight(const AttentionCase& c) {
  const AttentionOutcome outcome = RunAttentionCase(c);
  EXPECT_EQ(outcome.fault, "") << c.name;
  EXPECT_EQ(outcome.bank_conflicts, 0) << c.name;
}

class AttentionSweepTest
    : public ::testing::TestWithParam<std::tuple<ElementType, uint32_t>> {};

TEST_P(AttentionSweepTest, AgreesWithDoublePrecision) {
  const auto [type, head_dim] = GetParam();
  for (const AttentionCase& c : SweepCases(type, head_dim, /*full=*/false)) {
    ExpectRight(c);
  }
}

INSTANTIATE_TEST_SUITE_P(
    HeadDims, AttentionSweepTest,
    ::testing::Combine(::testing::Values(ElementType::kBf16,
                                         ElementType::kFp16),
                       ::testing::ValuesIn(kHeadDims)),
    [](const auto& param) {
      const bool bf16 = std::get<0>(param.param) == ElementType::kBf16;
      return (bf16 ? "Bf16_" : "Fp16_") +
             std::to_string(std::get<1>(param.param));
    });

TEST(AttentionTest, EveryPathAgreesWithDoublePrecision) {
  for (const AttentionCase& c : QuickCases()) ExpectRight(c);
}

TEST(AttentionTest, ManyHeadsOfOneKvHeadAreCutIntoBlocks) {
  AttentionCase c = QuickCases()[1];
  c.num_heads = 71;
  c.num_kv_heads = 1;
  ExpectRight(c);
}

TEST(AttentionTest, RowsThatSeeNothingGiveZeros) {
  AttentionCase c = QuickCases()[0];
  c.groups = {{.num_rows = 3, .position = 7, .visible = {}, .own_tokens = 0}};
  ExpectRight(c);
}

// Bits of group `g`'s rows.
std::vector<uint16_t> BitsOf(const AttentionCase& c, size_t g) {
  const AttentionOutcome outcome = RunAttentionCase(c);
  EXPECT_EQ(outcome.fault, "");
  size_t first = 0;
  for (size_t i = 0; i < g; ++i) first += c.groups[i].num_rows;
  const size_t row = size_t{c.num_heads} * c.head_dim;
  return {outcome.out.begin() + static_cast<ptrdiff_t>(first * row),
          outcome.out.begin() +
              static_cast<ptrdiff_t>((first + c.groups[g].num_rows) * row)};
}

AttentionCase InvariantCase() {
  AttentionCase c;
  c.batch_invariant = true;
  c.rope_pairs = 32;
  c.num_heads = 8;
  c.num_kv_heads = 2;
  c.modules = {{600, 5, 0}, {64, 0, 0}, {1100, 2, 7}};
  // No own tokens and nothing random but q of the first rows: the same in all
  // cases.
  c.groups = {{2, 2000, {{0, 0}, {1, 700}, {2, 800}}, 0}};
  return c;
}

TEST(AttentionInvarianceTest, BitsDoNotDependOnTheBatch) {
  const AttentionCase alone = InvariantCase();
  AttentionCase batch = alone;
  batch.num_multiprocessors = 132;
  batch.groups.push_back({1, 900, {{1, 50}, {2, 100}}, 0});
  batch.groups.push_back({20, 3000, {{0, 10}}, 0});
  EXPECT_EQ(BitsOf(alone, 0), BitsOf(batch, 0));
}

TEST(AttentionInvarianceTest, WithoutTheOptionTheyDo) {
  AttentionCase alone = InvariantCase();
  alone.batch_invariant = false;
  AttentionCase batch = alone;
  batch.num_multiprocessors = 132;
  EXPECT_NE(BitsOf(alone, 0), BitsOf(batch, 0));
}

}  // namespace
}  // namespace promptcache::gpu
