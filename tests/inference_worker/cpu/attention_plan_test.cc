#include "inference_worker/cpu/attention_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace promptcache::worker::cpu {
namespace {

using ::testing::Pair;

constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kHeadsPerKv = 4;
constexpr uint32_t kViewTokens = 8 * kSegmentTokens;

// Decoding requests over one long view each, and a token of their own.
class AttentionPlanTest : public ::testing::Test {
 protected:
  // Cut for one thread, so that only sharing cuts. The ids say which requests'
  // views are the same.
  size_t NumTasks(const std::vector<uint32_t>& ids, uint32_t num_threads = 1) {
    const AttentionShape shape = {.num_heads = kKvHeads * kHeadsPerKv,
                                  .layout = {.num_layers = 1,
                                             .num_kv_heads = kKvHeads,
                                             .head_dim = 16,
                                             .page_tokens = 16}};
    const KvView view = {.num_tokens = kViewTokens};
    std::vector<float> row(kKvHeads * kHeadsPerKv * 16);
    std::vector<AttentionGroup> groups;
    for (const uint32_t& id : ids) {
      groups.push_back({.queries = row.data(),
                        .query_stride = row.size(),
                        .out = row.data(),
                        .out_stride = row.size(),
                        .num_rows = 1,
                        .visible = {&view, 1},
                        .view_ids = {&id, 1},
                        .own = {.num_tokens = 1}});
    }
    AttentionPlan plan;
    plan.Build(shape, groups, num_threads);
    reads_ = plan.reads();
    return plan.num_tasks();
  }
  // Tokens needed and read.
  std::pair<uint64_t, uint64_t> Reads(const std::vector<uint32_t>& ids,
                                      uint32_t num_threads) {
    NumTasks(ids, num_threads);
    return {reads_.needed_tokens, reads_.read_tokens};
  }

 private:
  AttentionReads reads_;
};

TEST_F(AttentionPlanTest, ViewsThatNobodySharesAreReadOncePerRequest) {
  EXPECT_EQ(NumTasks({0, 0, 0, 0}), 4 * kKvHeads);
  EXPECT_EQ(NumTasks({1, 2, 3, 4}), 4 * kKvHeads);
}

TEST_F(AttentionPlanTest, ASharedViewIsOneTaskForAllItsRequests) {
  // One for the view; each request's own token.
  EXPECT_EQ(NumTasks({7, 7, 7, 7}), (1 + 4) * kKvHeads);
  EXPECT_EQ(NumTasks({7, 7, 7, 7, 7, 7}), (1 + 6) * kKvHeads);
}

TEST_F(AttentionPlanTest, AnOddRequestReadsItsViewAloneAndTheRestShare) {
  EXPECT_EQ(NumTasks({0, 7, 7}), (1 + 1 + 2) * kKvHeads);
  EXPECT_EQ(NumTasks({5, 7, 5, 7}), (2 + 4) * kKvHeads);
}

TEST_F(AttentionPlanTest, AsManyRequestsShareATaskAsItsRowsHaveRoomFor) {
  constexpr uint32_t kRoom = kMaxPackedRows / kHeadsPerKv;
  EXPECT_EQ(NumTasks(std::vector<uint32_t>(kRoom, 7)), (1 + kRoom) * kKvHeads);
  EXPECT_EQ(NumTasks(std::vector<uint32_t>(kRoom + 1, 7)),
            (2 + kRoom + 1) * kKvHeads);
}

TEST_F(AttentionPlanTest, CountsASharedViewOnceForAllItsRequests) {
  for (const uint32_t threads : {1u, 2u, 16u}) {
    EXPECT_THAT(Reads({0, 0, 0}, threads),
                Pair(3 * kViewTokens + 3, 3 * kViewTokens + 3));
    EXPECT_THAT(Reads({7, 7, 7}, threads),
                Pair(3 * kViewTokens + 3, kViewTokens + 3));
    EXPECT_THAT(Reads({7, 0, 7}, threads),
                Pair(3 * kViewTokens + 3, 2 * kViewTokens + 3));
  }
}

}  // namespace
}  // namespace promptcache::worker::cpu
