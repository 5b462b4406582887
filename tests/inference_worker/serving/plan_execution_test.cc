#include "inference_worker/serving/plan_execution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <list>
#include <map>
#include <set>
#include <utility>

#include "common/page_sum.h"
#include "inference_worker/serving/prefix_plan.h"
#include "tests/inference_worker/serving/hash_backend.h"
#include "tests/inference_worker/serving/plan_builder.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using pml::Plan;
using ::testing::Each;

// Pages that start out as garbage, as a reservation's may.
class TestPages {
 public:
  explicit TestPages(const KvLayout& layout) : layout_(layout) {}
  std::vector<std::byte*> Take(uint64_t count) {
    std::vector<std::byte*> pages;
    for (uint64_t i = 0; i < count; ++i) {
      pages.push_back(
          pages_.emplace_back(layout_.page_bytes(), std::byte{0xA5}).data());
    }
    return pages;
  }

 private:
  const KvLayout layout_;
  std::list<std::vector<std::byte>> pages_;
};

std::vector<const std::byte*> Const(const std::vector<std::byte*>& pages) {
  return {pages.begin(), pages.end()};
}

// One request computed step by step.
class Runner {
 public:
  Runner(std::shared_ptr<const Plan> plan, PlanExecution::Options options,
         size_t chunk_rows)
      : options_(WithRoom(options)),
        pages_(backend_.layout()),
        chunk_rows_(chunk_rows),
        execution_(std::move(plan), backend_.layout(), options_) {
    module_pages_.resize(execution_.plan().modules.size());
  }

  // Computes `modules`; the others come from `cache`.
  void Prefill(const std::vector<bool>& encode, const Runner* cache) {
    for (size_t i = 0; i < encode.size(); ++i) {
      if (encode[i]) {
        module_pages_[i] = pages_.Take(execution_.module_pages(i));
        execution_.SetWritable(i, Const(module_pages_[i]), module_pages_[i]);
      } else if (cache != nullptr) {
        execution_.SetReadable(i, Const(cache->module_pages_[i]));
      }
    }
    for (size_t i = 0; i < encode.size(); ++i) {
      if (encode[i]) {
        execution_.EncodeModule(i, pages_.Take(execution_.temporary_pages(i)));
      }
    }
    execution_.AddTail(pages_.Take(execution_.tail_pages(0)));
    execution_.ComputeFresh();
    Drain();
  }
  void EncodeAll() {
    Prefill(std::vector<bool>(execution_.plan().modules.size(), true), nullptr);
  }
  void Decode(const std::vector<int32_t>& tokens) {
    for (int32_t token : tokens) {
      execution_.Append(std::span(&token, 1));
      execution_.AddTail(pages_.Take(execution_.missing_tail_pages()));
      Drain();
    }
  }
  void Drain() {
    std::vector<RowGroup> groups;
    while (execution_.rows_left() > 0) {
      groups.clear();
      const size_t rows = execution_.NextRows(chunk_rows_, &groups);
      PC_ASSERT_OK(backend_.Forward(groups, &logits_));
      execution_.Advance(rows);
    }
  }

  PlanExecution& execution() { return execution_; }
  HashBackend& backend() { return backend_; }
  const std::vector<float>& logits() const { return logits_; }
  const std::vector<std::byte*>& module_pages(size_t i) const {
    return module_pages_[i];
  }

 private:
  static PlanExecution::Options WithRoom(PlanExecution::Options options) {
    options.max_new_tokens = 8;
    return options;
  }

  const PlanExecution::Options options_;
  HashBackend backend_;
  TestPages pages_;
  const size_t chunk_rows_;
  PlanExecution execution_;
  std::vector<std::vector<std::byte*>> module_pages_;
  std::vector<float> logits_;
};

std::vector<float> Expected(const Plan& plan, bool full,
                            const std::vector<int32_t>& generated = {}) {
  return HashLogits(OracleState(plan, full, generated), 64);
}

class PlanExecutionShapes : public ::testing::TestWithParam<uint32_t> {};

TEST_P(PlanExecutionShapes, ComputesWhatThePlanDefinesWithoutACache) {
  for (bool ends_cached : {false, true}) {
    const auto plan = PlanBuilder::Random(GetParam(), ends_cached);
    Runner run(plan, {}, 1000);
    run.EncodeAll();
    EXPECT_EQ(run.logits(), Expected(*plan, false));
    EXPECT_EQ(run.backend().passes(), 1u);
    EXPECT_EQ(run.backend().faults(), 0u);
  }
}

TEST_P(PlanExecutionShapes, AnyChunksGiveTheSame) {
  const auto plan = PlanBuilder::Random(GetParam());
  for (size_t chunk : {1, 2, 3, 5, 7}) {
    Runner run(plan, {}, chunk);
    run.EncodeAll();
    EXPECT_EQ(run.logits(), Expected(*plan, false)) << "chunk " << chunk;
    EXPECT_EQ(run.backend().faults(), 0u);
  }
}

TEST_P(PlanExecutionShapes, ReadsWhatIsPresentAndEncodesWhatIsMissing) {
  for (bool ends_cached : {false, true}) {
    const auto plan = PlanBuilder::Random(GetParam(), ends_cached);
    Runner cache(plan, {}, 4);
    cache.EncodeAll();
    for (uint32_t present = 0; present < (1u << plan->modules.size());
         present += 1 + GetParam() % 3) {
      std::vector<bool> encode(plan->modules.size());
      for (size_t i = 0; i < encode.size(); ++i) {
        encode[i] = ((present >> i) & 1) == 0;
      }
      Runner run(plan, {}, 6);
      run.Prefill(encode, &cache);
      EXPECT_EQ(run.logits(), Expected(*plan, false)) << "present " << present;
    }
  }
}

TEST_P(PlanExecutionShapes, DecodingGoesOnAfterThePlan) {
  const auto plan = PlanBuilder::Random(GetParam(), GetParam() % 2 == 0);
  Runner run(plan, {}, 1000);
  run.EncodeAll();
  std::vector<int32_t> generated;
  for (int32_t token : {3, 1, 4, 1, 5}) {
    run.Decode({token});
    generated.push_back(token);
    EXPECT_EQ(run.logits(), Expected(*plan, false, generated));
  }
  EXPECT_EQ(run.backend().faults(), 0u);
}

TEST_P(PlanExecutionShapes, ARepeatedRequestTakesItsTokensInChunks) {
  const auto plan = PlanBuilder::Random(GetParam(), GetParam() % 2 == 0);
  Runner run(plan, {}, 3);
  for (size_t i = 0; i < plan->modules.size(); ++i) {
    static TestPages pages(run.backend().layout());
    const auto taken = pages.Take(run.execution().module_pages(i));
    run.execution().SetWritable(i, Const(taken), taken);
    run.execution().EncodeModule(
        i, pages.Take(run.execution().temporary_pages(i)));
    if (i + 1 < plan->modules.size()) continue;
    run.execution().AddTail(pages.Take(run.execution().tail_pages(5)));
  }
  const std::vector<int32_t> generated = {9, 8, 7, 6, 5};
  run.execution().ComputeFresh();
  run.execution().Append(generated);
  run.Drain();
  EXPECT_EQ(run.logits(), Expected(*plan, false, generated));
}

TEST_P(PlanExecutionShapes, FullAttentionIsOneCausalSequence) {
  const auto plan = PlanBuilder::Random(GetParam());
  for (size_t chunk : {4, 1000}) {
    Runner run(plan, {.full_attention = true}, chunk);
    run.Prefill(std::vector<bool>(plan->modules.size(), false), nullptr);
    EXPECT_EQ(run.logits(), Expected(*plan, true));
    run.Decode({7, 7});
    EXPECT_EQ(run.logits(), Expected(*plan, true, {7, 7}));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PlanExecutionShapes, ::testing::Range(1u, 41u));

TEST(PlanExecutionTest, RowsOfAModuleSayWhereItsSchemaHasIt) {
  auto plan = std::make_shared<Plan>(*PlanBuilder::Random(3));
  std::map<int32_t, size_t> expected;  // rows by offset
  for (size_t i = 0; i < plan->modules.size(); ++i) {
    pml::PlanModule& module = plan->modules[i];
    module.schema_start = 100 * static_cast<int32_t>(i + 1);
    size_t& rows = expected[module.schema_start];
    rows = static_cast<size_t>(module.num_tokens());
    for (const pml::ContextItem& item : module.context) {
      rows += item.module < 0 ? item.tokens.size() : 0;
    }
    for (const pml::Piece& text : module.placeholders) {
      rows += text.tokens.size();
    }
  }
  Runner run(plan, {}, 5);
  std::map<int32_t, size_t> seen;
  run.backend().SetHook([&](std::span<const RowGroup> groups) {
    for (const RowGroup& group : groups) {
      seen[group.embedding_position_offset] += group.tokens.size();
    }
    return absl::OkStatus();
  });
  run.EncodeAll();
  expected[0] = seen[0];
  EXPECT_GT(seen[0], 0u);  // the prompt's own text
  EXPECT_EQ(seen, expected);
}

TEST(PlanExecutionTest, AnExactPlanEqualsFullAttention) {
  const auto plan = PlanBuilder::Exact(3);
  Runner modular(plan, {}, 1000);
  modular.EncodeAll();
  Runner full(plan, {.full_attention = true}, 1000);
  full.Prefill({false, false}, nullptr);
  EXPECT_EQ(modular.logits(), full.logits());
}

TEST(PlanExecutionTest, LinkedTokensSeeTheWholePlanBeforeThem) {
  // Two modules that did not see each other: with every token of the second
  // recomputed, the plan is as good as plain attention.
  PlanBuilder b(5);
  for (int i = 0; i < 2; ++i) {
    pml::PlanModule m;
    m.path = "m";
    m.pieces.push_back({0, b.Tokens(6)});
    m.length = 6;
    b.plan().modules.push_back(m);
  }
  b.PlaceModule(0, 0);
  b.PlaceModule(1, 6);
  b.PlaceFresh(12, b.Tokens(3));
  const auto plan = b.Build();
  Runner plain(plan, {}, 1000);
  plain.EncodeAll();
  Runner linked(plan, {.link_tokens = 6}, 1000);
  linked.EncodeAll();
  EXPECT_EQ(linked.logits(), Expected(*plan, true));
  EXPECT_NE(plain.logits(), Expected(*plan, true));
}

TEST(PlanExecutionTest, UnusedSlotsOfTheLastPageAreZero) {
  const auto plan = PlanBuilder::Exact(3, /*module_tokens=*/5);  // pages of 4
  Runner run(plan, {}, 1000);
  run.EncodeAll();
  const KvLayout& layout = run.backend().layout();
  const std::byte* page = run.module_pages(1)[1];
  for (size_t plane :
       {layout.key_offset_bytes(0), layout.value_offset_bytes(0)}) {
    const std::byte* unused = page + plane + layout.token_stride_bytes();
    EXPECT_THAT(std::span(unused, 3 * layout.token_stride_bytes()),
                Each(std::byte{0}));
  }
  // Wherever a module is written, its sums are the same.
  Runner other(plan, {}, 2);
  other.EncodeAll();
  EXPECT_EQ(PageSum({page, layout.page_bytes()}),
            PageSum({other.module_pages(1)[1], layout.page_bytes()}));
}

// A prompt without schema as a chain of modules.
std::shared_ptr<const Plan> Chain(int32_t num_tokens) {
  PlanBuilder b(2);
  b.PlaceFresh(0, b.Tokens(num_tokens));
  auto plan = std::make_shared<Plan>(*b.Build());
  EXPECT_TRUE(CutPrefix(plan.get()));
  return plan;
}

TEST(PlanExecutionTest, AChainsModulesShareOneListOfWhatTheySee) {
  const auto plan = Chain(10 * kPrefixChunkTokens + 5);
  Runner run(plan, {.chunk_tokens = kPrefixChunkTokens}, 1000);
  size_t most = 0;
  std::set<const KvView*> lists;
  run.backend().SetHook([&](std::span<const RowGroup> groups) {
    for (const RowGroup& group : groups) {
      if (group.logits != LogitsWanted::kNone || group.visible.empty())
        continue;
      lists.insert(group.visible.data());
      most = std::max(most, group.visible.size());
    }
    return absl::OkStatus();
  });
  run.EncodeAll();
  EXPECT_EQ(most, 9u);
  EXPECT_EQ(lists.size(), 1u);
  EXPECT_EQ(run.logits(), Expected(*plan, true));
}

TEST(PlanExecutionTest, AChainIsEncodedBehindAnyBeginningThatIsThere) {
  const auto plan = Chain(5 * kPrefixChunkTokens + 1);
  const PlanExecution::Options options{.chunk_tokens = kPrefixChunkTokens};
  Runner cache(plan, options, 50);
  cache.EncodeAll();
  for (uint32_t present = 0; present < 1u << 5; ++present) {
    std::vector<bool> encode(5);
    for (size_t i = 0; i < 5; ++i) encode[i] = ((present >> i) & 1) == 0;
    Runner run(plan, options, 90);
    run.Prefill(encode, &cache);
    EXPECT_EQ(run.logits(), Expected(*plan, true)) << "present " << present;
    EXPECT_EQ(run.backend().faults(), 0u);
  }
}

TEST(NeededModulesTest, FollowsContextsOfMissingModulesOnly) {
  PlanBuilder b(1);
  b.AddModule({});
  b.AddModule({{.module = 0, .num_tokens = 1, .offset = -9}});
  b.AddModule({{.module = 1, .num_tokens = 1, .offset = -9}});
  b.PlaceModule(2, 0);
  const auto plan = b.Build();
  using V = std::vector<bool>;
  EXPECT_EQ(NeededModules(*plan, V{true, true, true}), (V{false, false, true}));
  EXPECT_EQ(NeededModules(*plan, V{true, true, false}), (V{false, true, true}));
  EXPECT_EQ(NeededModules(*plan, V{true, false, false}), (V{true, true, true}));
}

}  // namespace
}  // namespace promptcache::worker
