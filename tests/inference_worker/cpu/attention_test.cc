#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "tests/inference_worker/cpu/kv_fixture.h"
#include "tests/inference_worker/cpu/reference.h"

namespace promptcache::worker::cpu {
namespace {

// Values lie within +-1.7, logits within a few units: fp32 arithmetic.
constexpr double kTolerance = 1e-5;

// A group of rows with its spans, and what surrounds it.
struct Case {
  AttentionShape shape;
  RopeTable::Options rope;
  std::optional<RopeTable> table;
  std::vector<SpanSpec> specs;  // own last
  std::vector<KvSpan> spans;
  std::vector<KvView> visible;
  uint32_t num_rows = 1;
  int32_t position = 0;
  std::vector<float> queries;
  std::vector<float> slopes;  // or empty
  std::optional<DistanceBias> bias;

  size_t row_floats() const {
    return size_t{shape.num_heads} * shape.layout.head_dim;
  }
};

struct CaseSpec {
  uint32_t head_dim = 64;
  uint32_t num_kv_heads = 2;
  uint32_t heads_per_kv = 3;
  uint32_t page_tokens = 16;
  uint32_t rotated_dims = 64;
  Pairing pairing = Pairing::kHalfSplit;
  std::vector<uint32_t> view_tokens;
  uint32_t own_tokens = 1;
  uint32_t num_rows = 1;
  uint32_t window = 0;
  bool alibi = false;  // instead of a rotation
  // A table of distances up to this instead of a rotation; -1: no.
  int32_t bias_reach = -1;
  bool without_own = false;
};

Case MakeCase(const CaseSpec& spec) {
  Case c;
  c.shape = {.num_heads = spec.num_kv_heads * spec.heads_per_kv,
             .layer = 1,
             .layout = {.num_layers = 2,
                        .num_kv_heads = spec.num_kv_heads,
                        .head_dim = spec.head_dim,
                        .page_tokens = spec.page_tokens},
             .scale = 1.0f / std::sqrt(static_cast<float>(spec.head_dim)),
             .window = spec.window};
  for (uint32_t head = 0; spec.alibi && head < c.shape.num_heads; ++head) {
    c.slopes.push_back(0.25f / static_cast<float>(1 + 3 * head));
  }
  if (spec.bias_reach >= 0) {
    c.bias = DistanceBias::Create(c.shape.num_heads, spec.bias_reach, TestBias);
  }
  c.rope = {.inv_freq = RopeTable::PlainFrequencies(10000.0, spec.rotated_dims),
            .pairing = spec.pairing,
            .max_position = 20000};
  c.table = *RopeTable::Create(c.rope);
  // A bias that grows with the distance leaves nothing else to be seen.
  const int32_t ahead = spec.alibi || c.bias.has_value() ? 20 : 5000;
  int32_t position = 0;
  for (size_t i = 0; i < spec.view_tokens.size(); ++i) {
    const auto index = static_cast<uint32_t>(i);
    // Some begin mid-page, some far away, one behind the query.
    c.specs.push_back(
        {.first_token = index * 7 % 19,
         .num_tokens = spec.view_tokens[i],
         .position_offset = i % 3 == 2 ? position + ahead : position - 100,
         .local_position = static_cast<int32_t>(i) * 3,
         .seed = index + 2});
    position += static_cast<int32_t>(spec.view_tokens[i]);
  }
  c.num_rows = spec.num_rows;
  c.position = position + static_cast<int32_t>(spec.own_tokens - spec.num_rows);
  c.specs.push_back({.first_token = 5,
                     .num_tokens = spec.own_tokens,
                     .position_offset = position,
                     .seed = 1});
  for (const SpanSpec& s : c.specs) {
    c.spans.push_back(MakeSpan(c.shape.layout, s));
  }
  for (const KvSpan& span : c.spans) c.visible.push_back(span.view);
  c.visible.pop_back();
  if (spec.without_own) c.spans.back().view.num_tokens = 0;
  c.queries = RandomFloats(c.num_rows * c.row_floats(), 7);
  return c;
}

AttentionGroup GroupOf(const Case& c, float* out) {
  return {.queries = c.queries.data(),
          .query_stride = c.row_floats(),
          .out = out,
          .out_stride = c.row_floats(),
          .num_rows = c.num_rows,
          .position = c.position,
          .visible = c.visible,
          .own = c.spans.back().view};
}

AttentionShape ShapeOf(const Case& c) {
  AttentionShape shape = c.shape;
  if (c.bias.has_value()) {
    shape.distance_bias = &*c.bias;
  } else if (c.slopes.empty()) {
    shape.rope = &*c.table;
  } else {
    shape.alibi_slopes = c.slopes.data();
  }
  return shape;
}

std::vector<float> Attend(Kernels* kernels, const Case& c) {
  std::vector<float> out(c.num_rows * c.row_floats(), -77.0f);
  const AttentionGroup group = GroupOf(c, out.data());
  kernels->Attend(ShapeOf(c), {&group, 1});
  return out;
}

// Row by row, each as a group of its own that ends there.
std::vector<float> AttendAlone(Kernels* kernels, const Case& c) {
  std::vector<float> out(c.num_rows * c.row_floats());
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    AttentionGroup group = GroupOf(c, out.data() + row * c.row_floats());
    group.queries += row * c.row_floats();
    group.num_rows = 1;
    group.position += static_cast<int32_t>(row);
    group.own.num_tokens -= c.num_rows - row - 1;
    kernels->Attend(ShapeOf(c), {&group, 1});
  }
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectMatchesReference(Kernels* kernels, const Case& c,
                            const std::string& what) {
  const std::vector<float> out = Attend(kernels, c);
  std::vector<const KvSpan*> spans;
  for (const KvSpan& span : c.spans) spans.push_back(&span);
  std::vector<float> ignored(out.size());
  for (uint32_t row = 0; row < c.num_rows; ++row) {
    if (c.num_rows > 10 && row % 7 != 0 && row + 1 != c.num_rows) continue;
    const std::vector<double> want =
        AttendReference(ShapeOf(c), ShapeOf(c).rope ? &c.rope : nullptr,
                        GroupOf(c, ignored.data()), spans, row);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(out[row * c.row_floats() + i], want[i], kTolerance)
          << what << ", row " << row << ", element " << i;
    }
  }
}

class AttentionTest : public ::testing::TestWithParam<std::string> {};

TEST_P(AttentionTest, MatchesDoublePrecisionForEveryLength) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (uint32_t tokens :
       {0u, 1u, 15u, 16u, 17u, 63u, 64u, 65u, 255u, 256u, 257u, 2100u}) {
    for (uint32_t own : {1u, 64u, 65u, 257u}) {
      const Case c = MakeCase({.view_tokens = {tokens, 3, tokens / 2},
                               .own_tokens = own,
                               .num_rows = own == 257 ? 3u : 1u});
      ExpectMatchesReference(kernels.get(), c, std::to_string(tokens));
    }
  }
}

TEST_P(AttentionTest, MatchesDoublePrecisionForEveryHeadShape) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (uint32_t dim : {16u, 32u, 48u, 64u, 80u, 96u, 112u, 128u, 256u}) {
    for (uint32_t heads : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u}) {
      // Every group size where heads are usual, some elsewhere.
      if (dim != 64 && heads % 3 != 1 && heads != 8) continue;
      const bool odd = heads % 2 == 1;
      const Case c = MakeCase({.head_dim = dim,
                               .num_kv_heads = 1 + heads % 3,
                               .heads_per_kv = heads,
                               .page_tokens = odd ? 16u : 5u,
                               .rotated_dims = odd ? dim : dim / 2,
                               .pairing = heads % 4 < 2 ? Pairing::kHalfSplit
                                                        : Pairing::kInterleaved,
                               .view_tokens = {70, 0, 33},
                               .own_tokens = 20 + heads,
                               .num_rows = 1 + heads});
      ExpectMatchesReference(
          kernels.get(), c,
          std::to_string(dim) + " x " + std::to_string(heads));
    }
  }
}

TEST_P(AttentionTest, MatchesDoublePrecisionForManyViewsAndRows) {
  auto kernels = MakeKernels(GetParam(), 3);
  for (size_t views = 0; views <= 10; ++views) {
    std::vector<uint32_t> tokens;
    for (size_t i = 0; i < views; ++i) {
      tokens.push_back(static_cast<uint32_t>(i * 37 % 101));
    }
    const Case c =
        MakeCase({.view_tokens = tokens, .own_tokens = 140, .num_rows = 70});
    ExpectMatchesReference(kernels.get(), c, std::to_string(views) + " views");
  }
}

TEST_P(AttentionTest, WindowsMatchDoublePrecision) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (uint32_t window : {1u, 16u, 63u, 64u, 65u, 257u, 900u}) {
    for (const std::vector<uint32_t>& views :
         {std::vector<uint32_t>{}, {300, 1, 70}}) {
      const Case c = MakeCase({.view_tokens = views,
                               .own_tokens = 300,
                               .num_rows = 231,
                               .window = window});
      ExpectMatchesReference(kernels.get(), c, std::to_string(window));
    }
  }
}

TEST_P(AttentionTest, BiasesMatchDoublePrecision) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (uint32_t heads : {1u, 4u, 5u}) {
    for (uint32_t window : {0u, 37u}) {
      // Views stand behind the query, before it and beyond it.
      const Case c = MakeCase({.head_dim = 48,
                               .heads_per_kv = heads,
                               .view_tokens = {70, 0, 33, 300},
                               .own_tokens = 150,
                               .num_rows = 90,
                               .window = window,
                               .alibi = true});
      ExpectMatchesReference(kernels.get(), c, std::to_string(heads));
    }
  }
}

TEST_P(AttentionTest, BiasesByTableMatchDoublePrecision) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (int32_t reach : {0, 1, 20, 63, 64, 500}) {
    for (uint32_t heads : {1u, 4u}) {
      const Case c = MakeCase({.head_dim = 16,
                               .heads_per_kv = heads,
                               .view_tokens = {70, 0, 33, 300},
                               .own_tokens = 150,
                               .num_rows = 90,
                               .bias_reach = reach});
      ExpectMatchesReference(kernels.get(), c, std::to_string(reach));
    }
  }
}

TEST_P(AttentionTest, ARowMaySeeNothingOfItsOwn) {
  auto kernels = MakeKernels(GetParam(), 2);
  for (const uint32_t rows : {1u, 90u}) {
    for (const int32_t reach : {-1, 20}) {
      const Case c = MakeCase({.view_tokens = {70, 300, 1},
                               .own_tokens = rows,
                               .num_rows = rows,
                               .bias_reach = reach,
                               .without_own = true});
      ExpectMatchesReference(kernels.get(), c, std::to_string(rows));
    }
  }
}

TEST_P(AttentionTest, ARowThatSeesNothingGivesZeros) {
  auto kernels = MakeKernels(GetParam(), 2);
  const Case c = MakeCase({.view_tokens = {0},
                           .own_tokens = 3,
                           .num_rows = 3,
                           .without_own = true});
  for (const float x : Attend(kernels.get(), c)) ASSERT_EQ(x, 0.0f);
}

TEST_P(AttentionTest, RowsDoNotDependOnChunksOrThreads) {
  auto single = MakeKernels(GetParam(), 1);
  for (const uint32_t window : {0u, 100u, 700u}) {
    const Case c = MakeCase({.view_tokens = {300, 1, 700},
                             .own_tokens = 600,
                             .num_rows = 333,
                             .window = window,
                             .alibi = window == 700});
    const std::vector<float> alone = AttendAlone(single.get(), c);
    for (uint32_t threads : {1u, 2u, 3u}) {
      auto kernels = MakeKernels(GetParam(), threads);
      EXPECT_TRUE(SameBits(Attend(kernels.get(), c), alone)) << threads;
      EXPECT_TRUE(SameBits(AttendAlone(kernels.get(), c), alone)) << threads;
    }
  }
}

TEST_P(AttentionTest, TokensBeforeTheWindowAreNeverReadIntoARow) {
  auto kernels = MakeKernels(GetParam(), 2);
  Case c = MakeCase(
      {.view_tokens = {100}, .own_tokens = 200, .num_rows = 150, .window = 60});
  const std::vector<float> before = Attend(kernels.get(), c);
  // Own token 40 is seen up to own token 99, row 49.
  for (uint32_t head = 0; head < c.shape.layout.num_kv_heads; ++head) {
    for (uint32_t d = 0; d < c.shape.layout.head_dim; ++d) {
      KeyOf(c.shape.layout, c.spans.back(), 1, head, 40)[d] = 0x7fc0;
      ValueOf(c.shape.layout, c.spans.back(), 1, head, 40)[d] = 0x7f80;
    }
  }
  const std::vector<float> after = Attend(kernels.get(), c);
  const size_t clean = 50 * c.row_floats();
  EXPECT_EQ(std::memcmp(&before[clean], &after[clean],
                        (before.size() - clean) * sizeof(float)),
            0);
  for (size_t i = 0; i < clean; ++i) ASSERT_TRUE(std::isnan(after[i])) << i;
}

TEST_P(AttentionTest, RowsDoNotDependOnTheBatch) {
  auto kernels = MakeKernels(GetParam(), 3);
  std::vector<Case> cases;
  for (uint32_t i = 0; i < 5; ++i) {
    cases.push_back(MakeCase({.view_tokens = {i * 400, 90},
                              .own_tokens = 30 + 60 * i,
                              .num_rows = i == 3 ? 100u : 1u}));
  }
  std::vector<std::vector<float>> alone;
  std::vector<std::vector<float>> outs;
  for (const Case& c : cases) {
    alone.push_back(Attend(kernels.get(), c));
    outs.emplace_back(alone.back().size());
  }
  std::vector<AttentionGroup> groups;
  for (size_t i = 0; i < cases.size(); ++i) {
    groups.push_back(GroupOf(cases[i], outs[i].data()));
  }
  kernels->Attend(ShapeOf(cases[0]), groups);
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(SameBits(outs[i], alone[i])) << "group " << i;
  }
}

// Groups that see the first case's views, some of them elsewhere and in
// another order, and each a span of its own.
struct Company {
  std::vector<Case> cases;
  std::vector<std::vector<KvView>> visible;
  std::vector<std::vector<uint32_t>> ids;
  std::vector<std::vector<float>> outs;

  std::vector<AttentionGroup> Groups(bool with_ids) {
    outs.clear();
    for (const Case& c : cases) outs.emplace_back(c.num_rows * c.row_floats());
    std::vector<AttentionGroup> groups;
    for (size_t i = 0; i < cases.size(); ++i) {
      groups.push_back(GroupOf(cases[i], outs[i].data()));
      groups.back().visible = visible[i];
      if (with_ids) groups.back().view_ids = ids[i];
    }
    return groups;
  }
};

Company MakeCompany(uint32_t window, bool alibi, uint32_t count = 9) {
  Company company;
  for (uint32_t i = 0; i < count; ++i) {
    company.cases.push_back(MakeCase({.view_tokens = {600, 70, 64, 5},
                                      .own_tokens = 5 + 50 * i,
                                      .num_rows = 1 + 4 * (i % 4),
                                      .window = window,
                                      .alibi = alibi}));
  }
  for (uint32_t i = 0; i < count; ++i) {
    std::vector<KvView> views = company.cases[0].visible;
    std::vector<uint32_t> ids = {7, 3, i % 2, 0};
    // The last of these is of the group's own after all.
    views[3] = company.cases[i].visible[3];
    if (ids[2] == 0) views[2] = company.cases[i].visible[2];
    if (!alibi) views[0].position_offset += static_cast<int32_t>(i % 3);
    if (i % 3 == 1) {
      std::swap(views[0], views[1]);
      std::swap(ids[0], ids[1]);
    }
    company.visible.push_back(views);
    company.ids.push_back(ids);
  }
  return company;
}

TEST_P(AttentionTest, ViewsReadOnceForAllGroupsChangeNoBit) {
  for (uint32_t threads : {1u, 3u}) {
    auto kernels = MakeKernels(GetParam(), threads);
    for (const uint32_t window : {0u, 200u, 1000u}) {
      Company company = MakeCompany(window, window == 200);
      const AttentionShape shape = ShapeOf(company.cases[0]);
      for (AttentionGroup& group : company.Groups(/*with_ids=*/false)) {
        kernels->Attend(shape, {&group, 1});
      }
      const auto alone = company.outs;
      kernels->Attend(shape, company.Groups(/*with_ids=*/true));
      for (size_t i = 0; i < alone.size(); ++i) {
        EXPECT_TRUE(SameBits(company.outs[i], alone[i]))
            << "group " << i << ", window " << window;
      }
    }
  }
}

TEST_P(AttentionTest, ASharedViewMayHaveMoreRowsThanATaskTakes) {
  auto kernels = MakeKernels(GetParam(), 2);
  Company company = MakeCompany(0, false, 40);  // 280 rows of 3 heads
  const AttentionShape shape = ShapeOf(company.cases[0]);
  for (AttentionGroup& group : company.Groups(/*with_ids=*/false)) {
    kernels->Attend(shape, {&group, 1});
  }
  const auto alone = company.outs;
  kernels->Attend(shape, company.Groups(/*with_ids=*/true));
  EXPECT_EQ(company.outs, alone);
}

// Where a task reads is what says that the sharing is there: with one number
// for different views, all groups get what the first one's view gives.
TEST_P(AttentionTest, ViewsOfOneNumberAreReadFromTheFirstOfThem) {
  auto kernels = MakeKernels(GetParam(), 2);
  Company company = MakeCompany(0, false, 2);
  company.visible[1] = company.visible[0];
  company.ids[1] = company.ids[0];
  KvSpan other =
      MakeSpan(company.cases[0].shape.layout, {.num_tokens = 600, .seed = 99});
  other.view.position_offset = company.visible[0][0].position_offset;
  const AttentionShape shape = ShapeOf(company.cases[0]);
  kernels->Attend(shape, company.Groups(/*with_ids=*/false));
  const auto expected = company.outs;
  company.visible[1][0] = other.view;
  kernels->Attend(shape, company.Groups(/*with_ids=*/false));
  EXPECT_FALSE(SameBits(company.outs[1], expected[1]));
  kernels->Attend(shape, company.Groups(/*with_ids=*/true));
  EXPECT_TRUE(SameBits(company.outs[1], expected[1]));
}

TEST_P(AttentionTest, RowsDoNotDependOnWhereTokensLie) {
  auto kernels = MakeKernels(GetParam(), 2);
  Case c =
      MakeCase({.view_tokens = {300, 64, 5}, .own_tokens = 90, .num_rows = 40});
  const std::vector<float> before = Attend(kernels.get(), c);
  for (size_t i = 0; i < c.spans.size(); ++i) {
    c.specs[i].first_token = (c.specs[i].first_token * 3 + 4) % 40;
    c.spans[i] = MakeSpan(c.shape.layout, c.specs[i]);
    if (i < c.visible.size()) c.visible[i] = c.spans[i].view;
  }
  EXPECT_TRUE(SameBits(Attend(kernels.get(), c), before));
}

TEST_P(AttentionTest, LaterTokensOfTheSpanAreNeverReadIntoARow) {
  auto kernels = MakeKernels(GetParam(), 2);
  Case c = MakeCase({.view_tokens = {20}, .own_tokens = 200, .num_rows = 150});
  const std::vector<float> before = Attend(kernels.get(), c);
  const uint32_t poisoned = 117;  // seen by row 67 and later
  for (uint32_t head = 0; head < c.shape.layout.num_kv_heads; ++head) {
    for (uint32_t d = 0; d < c.shape.layout.head_dim; ++d) {
      KeyOf(c.shape.layout, c.spans.back(), 1, head, poisoned)[d] = 0x7fc0;
      ValueOf(c.shape.layout, c.spans.back(), 1, head, poisoned)[d] = 0x7f80;
    }
  }
  const std::vector<float> after = Attend(kernels.get(), c);
  const size_t clean = 67 * c.row_floats();
  EXPECT_EQ(std::memcmp(before.data(), after.data(), clean * sizeof(float)), 0);
  for (size_t i = clean; i < after.size(); ++i) {
    ASSERT_TRUE(std::isnan(after[i])) << i;
  }
}

TEST_P(AttentionTest, GivesTheOnlyTokensValueExactly) {
  auto kernels = MakeKernels(GetParam(), 1);
  const Case c = MakeCase({.own_tokens = 1});
  const std::vector<float> out = Attend(kernels.get(), c);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto head = static_cast<uint32_t>(i / 64 / 3);
    ASSERT_EQ(out[i], FromBf16(ValueOf(c.shape.layout, c.spans[0], 1, head,
                                       0)[i % 64]));
  }
}

TEST_P(AttentionTest, StandsLargeLogits) {
  auto kernels = MakeKernels(GetParam(), 2);
  Case c = MakeCase({.view_tokens = {300}, .own_tokens = 80, .num_rows = 4});
  for (float& q : c.queries) q *= 1000.0f;
  for (float x : Attend(kernels.get(), c)) {
    ASSERT_TRUE(std::abs(x) <= 1.71f) << x;
  }
}

TEST_P(AttentionTest, RelocatedKeysActAsKeysComputedThere) {
  // The same raw keys written at position 0 of a module that stands at 913,
  // and written where they stand.
  const Case c = MakeCase({.own_tokens = 40});
  const KvLayout& layout = c.shape.layout;
  const size_t stride = layout.num_kv_heads * layout.head_dim;
  const std::vector<float> keys = RandomFloats(40 * stride, 3);
  const std::vector<float> values = RandomFloats(40 * stride, 4);
  auto kernels = MakeKernels(GetParam(), 2);
  std::vector<std::vector<float>> outs;
  for (int32_t origin : {913, 0}) {
    KvSpan span =
        MakeEmptySpan(layout, {.num_tokens = 40, .position_offset = origin});
    const KvWrite write = {.keys = keys.data(),
                           .values = values.data(),
                           .row_stride = stride,
                           .num_rows = 40,
                           .position = 913,
                           .own = span.view,
                           .write_pages = span.write_table.data()};
    kernels->WriteKv(ShapeOf(c), {&write, 1});
    outs.emplace_back(c.row_floats());
    AttentionGroup group = GroupOf(c, outs.back().data());
    group.position = 952;
    group.own = span.view;
    kernels->Attend(ShapeOf(c), {&group, 1});
  }
  for (size_t i = 0; i < outs[0].size(); ++i) {
    // Both round their keys to bf16 once, differently.
    ASSERT_NEAR(outs[0][i], outs[1][i], 0.02) << i;
  }
  EXPECT_FALSE(SameBits(outs[0], outs[1]));
}

TEST_P(AttentionTest, WritesKeysRotatedToTheirFrameAndValuesAsTheyAre) {
  for (Pairing pairing : {Pairing::kHalfSplit, Pairing::kInterleaved}) {
    const Case c = MakeCase({.head_dim = 80,
                             .rotated_dims = 48,
                             .pairing = pairing,
                             .own_tokens = 1});
    const KvLayout& layout = c.shape.layout;
    const size_t stride = layout.num_kv_heads * layout.head_dim + 9;
    const std::vector<float> keys = RandomFloats(37 * stride, 3);
    const std::vector<float> values = RandomFloats(37 * stride, 4);
    // Tokens 4.. of 41 tokens, at positions behind the origin and beyond it.
    KvSpan span = MakeEmptySpan(
        layout, {.first_token = 3, .num_tokens = 41, .position_offset = 110});
    const KvWrite write = {.keys = keys.data(),
                           .values = values.data(),
                           .row_stride = stride,
                           .num_rows = 37,
                           .position = 100,
                           .own = span.view,
                           .write_pages = span.write_table.data()};
    MakeKernels(GetParam(), 2)->WriteKv(ShapeOf(c), {&write, 1});
    for (uint32_t row = 0; row < 37; ++row) {
      for (uint32_t head = 0; head < layout.num_kv_heads; ++head) {
        const size_t at = row * stride + head * layout.head_dim;
        const std::vector<double> want =
            RotateReference({&keys[at], layout.head_dim}, &c.rope,
                            static_cast<int32_t>(row) - 10);
        const uint16_t* k = KeyOf(layout, span, 1, head, row + 4);
        const uint16_t* v = ValueOf(layout, span, 1, head, row + 4);
        for (uint32_t d = 0; d < layout.head_dim; ++d) {
          // Half a unit in the last place of bf16, and fp32's error.
          ASSERT_NEAR(FromBf16(k[d]), want[d],
                      std::abs(want[d]) * 0.00392 + 1e-6);
          ASSERT_EQ(v[d], ToBf16(values[at + d]));
        }
      }
    }
    // What is not written stays: the other layer, the tokens before.
    EXPECT_EQ(KeyOf(layout, span, 0, 0, 20)[0], 0xffff);
    EXPECT_EQ(KeyOf(layout, span, 1, 0, 3)[0], 0xffff);
  }
}

TEST_P(AttentionTest, NothingToDoIsFine) {
  auto kernels = MakeKernels(GetParam(), 2);
  Case c = MakeCase({.own_tokens = 4});
  kernels->Attend(ShapeOf(c), {});
  kernels->WriteKv(ShapeOf(c), {});
  std::vector<float> out(c.row_floats());
  AttentionGroup group = GroupOf(c, out.data());
  group.num_rows = 0;
  group.own = {};
  kernels->Attend(ShapeOf(c), {&group, 1});
  EXPECT_EQ(out, std::vector<float>(c.row_floats()));
}

INSTANTIATE_TEST_SUITE_P(AllThatRun, AttentionTest,
                         ::testing::ValuesIn(Kernels::Runnable()),
                         [](const auto& named) { return named.param; });

}  // namespace
}  // namespace promptcache::worker::cpu
