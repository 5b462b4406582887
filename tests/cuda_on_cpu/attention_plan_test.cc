// Every row meets every token that it sees once, whatever the plan's cuts are.
#include "cuda/kernels/attention_plan.h"

#include <cstring>
#include <list>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace promptcache::gpu {
namespace {

constexpr uint32_t kPageTokens = 16;

// The address of a token's page, and its slot.
using Place = std::pair<const std::byte*, uint32_t>;

template <class T>
const T* At(const AttentionPlan& plan, uint32_t offset) {
  return reinterpret_cast<const T*>(plan.bytes().data() + offset);
}

// What each row reads, item by item, according to the plan; and the states.
struct Reading {
  std::map<int32_t, std::multiset<Place>> places;  // by row
  std::map<int32_t, std::multiset<int32_t>> states;
};

Reading Read(const AttentionPlan& plan) {
  Reading reading;
  AttentionPlanHeader header;
  std::memcpy(&header, plan.bytes().data(), sizeof header);
  const auto* items = At<AttentionItem>(plan, header.items);
  const auto* pages = At<const std::byte*>(plan, header.pages);
  for (uint32_t i = 0; i < header.num_large_items + header.num_small_items;
       ++i) {
    for (uint32_t r = 0; r < items[i].num_rows; ++r) {
      const AttentionItemRow row =
          At<AttentionItemRow>(plan, header.item_rows)[items[i].first_row + r];
      reading.states[row.row].insert(row.state);
      auto& places = reading.places[row.row];
      for (uint32_t k = 0; k < items[i].num_parts; ++k) {
        const AttentionPart part =
            At<AttentionPart>(plan, header.parts)[items[i].first_part + k];
        const AttentionPartRow seen =
            At<AttentionPartRow>(plan, header.part_rows)[part.first_row + r];
        EXPECT_EQ(part.first_token % 64, 0u);
        EXPECT_GE(seen.reach, part.min_reach);
        for (uint32_t t = part.first_token;
             t < part.end_token && static_cast<int32_t>(t) < seen.end_token;
             ++t) {
          const uint32_t place = part.first_slot + t;
          places.insert({pages[part.first_page + place / kPageTokens],
                         place % kPageTokens});
        }
      }
    }
  }
  return reading;
}

class AttentionPlanTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  // A module of `tokens` tokens, its pages at addresses of its own.
  KvView NewView(uint32_t tokens, uint32_t first_token) {
    auto& table = tables_.emplace_back();
    for (uint32_t t = 0; t < first_token + tokens; t += kPageTokens) {
      table.push_back(reinterpret_cast<const std::byte*>(++next_page_ * 4096));
    }
    return {.pages = table.data(),
            .first_token = first_token,
            .num_tokens = tokens,
            .position_offset = static_cast<int32_t>(next_page_ % 100)};
  }
  uint32_t Random(uint32_t below) {
    return static_cast<uint32_t>(random_()) % below;
  }

  std::mt19937 random_{GetParam()};
  std::list<std::vector<const std::byte*>> tables_;
  uintptr_t next_page_ = 0;
};

TEST_P(AttentionPlanTest, CoversWhatRowsSeeExactlyOnce) {
  std::vector<KvView> modules;
  for (uint32_t i = 0; i < 6; ++i) {
    modules.push_back(NewView(Random(400), Random(40)));
  }
  std::vector<std::vector<KvView>> visible(1 + Random(5));
  std::vector<AttentionGroup> groups;
  uint32_t row = 0;
  for (auto& views : visible) {
    for (const KvView& module : modules) {
      if (Random(2) == 0) continue;
      views.push_back(module);
      views.back().position_offset += static_cast<int32_t>(Random(3));
    }
    AttentionGroup group = {.first_row = row,
                            .num_rows = 1 + Random(Random(2) == 0 ? 4 : 90),
                            .position = 1000,
                            .visible = views,
                            .own = {}};
    if (Random(4) > 0) group.own = NewView(group.num_rows + Random(90), 3);
    row += group.num_rows;
    groups.push_back(group);
  }
  AttentionPlan plan;
  plan.Build({.head_dim = 64,
              .num_heads = 2 * (1 + Random(20)),
              .num_kv_heads = 2,
              .page_tokens = kPageTokens,
              .num_multiprocessors = 1 + Random(132),
              .batch_invariant = Random(2) == 0,
              .rotate_keys = Random(2) == 0},
             groups);
  const Reading reading = Read(plan);
  uint32_t merged_rows = 0;
  std::set<int32_t> states;
  for (const AttentionGroup& group : groups) {
    for (uint32_t r = 0; r < group.num_rows; ++r) {
      std::multiset<Place> expected;
      const auto see = [&](const KvView& view, uint32_t end) {
        for (uint32_t t = 0; t < end; ++t) {
          const uint32_t place = view.first_token + t;
          expected.insert(
              {view.pages[place / kPageTokens], place % kPageTokens});
        }
      };
      for (const KvView& view : group.visible) see(view, view.num_tokens);
      if (group.own.num_tokens > 0) {
        see(group.own, group.own.num_tokens - group.num_rows + r + 1);
      }
      const auto id = static_cast<int32_t>(group.first_row + r);
      ASSERT_TRUE(reading.places.at(id) == expected) << "row " << id;
      const auto& row_states = reading.states.at(id);
      if (row_states.size() > 1) {
        ++merged_rows;
        states.insert(row_states.begin(), row_states.end());
        EXPECT_GE(*row_states.begin(), 0);
      } else {
        EXPECT_EQ(*row_states.begin(), -1);
      }
    }
  }
  EXPECT_EQ(plan.grid().merged_rows, merged_rows);
  // States are numbered without gaps.
  EXPECT_TRUE(states.empty() ||
              *states.rbegin() == static_cast<int32_t>(states.size()) - 1);
}

INSTANTIATE_TEST_SUITE_P(Seeds, AttentionPlanTest, ::testing::Range(0u, 60u));

TEST(AttentionPlanSharingTest, AModuleOfManyRequestsIsReadOnce) {
  std::vector<const std::byte*> table(64);
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = reinterpret_cast<const std::byte*>((i + 1) * 4096);
  }
  const std::vector<KvView> visible = {
      {.pages = table.data(), .num_tokens = 1000}};
  std::vector<AttentionGroup> groups;
  for (uint32_t i = 0; i < 8; ++i) {
    groups.push_back({.first_row = i,
                      .num_rows = 1,
                      .position = 1000,
                      .visible = visible,
                      .own = {}});
  }
  AttentionPlan plan;
  plan.Build({.head_dim = 64,
              .num_heads = 8,
              .num_kv_heads = 8,
              .page_tokens = kPageTokens},
             groups);
  EXPECT_EQ(plan.grid().small_items, 1u);
  EXPECT_EQ(plan.grid().large_items, 0u);
  EXPECT_EQ(plan.grid().merged_rows, 0u);
}

}  // namespace
}  // namespace promptcache::gpu
