#include "inference_worker/engine/shared_views.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kPageTokens = 4;

class SharedViewsTest : public ::testing::Test {
 protected:
  // A table with those of the pages that are there.
  const std::byte* const* Table(const std::vector<size_t>& pages) {
    std::vector<const std::byte*>& table = tables_.emplace_back();
    for (size_t page : pages) table.push_back(pages_ + page);
    return table.data();
  }
  void Find(const std::vector<std::vector<KvView>>& views) {
    std::vector<RowGroup> groups;
    for (const auto& v : views) groups.push_back({.visible = v});
    shared_.Find(groups, kPageTokens);
  }

  SharedViews shared_;

 private:
  std::byte pages_[16] = {};
  std::deque<std::vector<const std::byte*>> tables_;
};

TEST_F(SharedViewsTest, TablesOfTheSamePagesAreOneView) {
  const KvView a = {.pages = Table({1, 2, 3}), .num_tokens = 10};
  KvView b = {.pages = Table({1, 2, 3}), .num_tokens = 10};
  b.position_offset = 77;
  const KvView c = {.pages = Table({4}), .num_tokens = 3};
  Find({{a, c}, {}, {b}});
  EXPECT_THAT(shared_.ids(0), ElementsAre(1, 0));
  EXPECT_THAT(shared_.ids(1), IsEmpty());
  EXPECT_THAT(shared_.ids(2), ElementsAre(1));
}

TEST_F(SharedViewsTest, WhereATableBeginsDoesNotMatter) {
  const KvView a = {
      .pages = Table({9, 1, 2}), .first_token = 5, .num_tokens = 6};
  const KvView b = {.pages = Table({1, 2}), .first_token = 1, .num_tokens = 6};
  Find({{a}, {b}});
  EXPECT_THAT(shared_.ids(0), ElementsAre(1));
  EXPECT_THAT(shared_.ids(1), ElementsAre(1));
}

// Such as one whose last token is computed anew, or whose first are linked.
TEST_F(SharedViewsTest, AnOddViewOfThePagesLeavesTheOthersShared) {
  const KvView same = {.pages = Table({1, 2}), .num_tokens = 6};
  const KvView odd[] = {
      {.pages = Table({1, 2}), .num_tokens = 5},
      {.pages = Table({1, 2}), .first_token = 1, .num_tokens = 6},
      {.pages = Table({1, 2}), .num_tokens = 6, .local_position = 2}};
  for (const KvView& first : odd) {
    Find({{first}, {same}, {same}});
    EXPECT_THAT(shared_.ids(0), ElementsAre(0));
    EXPECT_THAT(shared_.ids(1), ElementsAre(1));
    EXPECT_THAT(shared_.ids(2), ElementsAre(1));
    // Odd ones are shared among themselves.
    Find({{first}, {same}, {first}, {same}});
    EXPECT_THAT(shared_.ids(0), ElementsAre(1));
    EXPECT_THAT(shared_.ids(1), ElementsAre(2));
    EXPECT_THAT(shared_.ids(2), ElementsAre(1));
    EXPECT_THAT(shared_.ids(3), ElementsAre(2));
  }
}

TEST_F(SharedViewsTest, OtherTokensOfThePagesAreAnotherView) {
  const KvView a = {.pages = Table({1, 2}), .num_tokens = 6};
  const KvView differ[] = {
      {.pages = Table({1, 2}), .num_tokens = 5},
      {.pages = Table({1, 2}), .first_token = 1, .num_tokens = 6},
      {.pages = Table({1, 3}), .num_tokens = 6},
      {.pages = Table({2, 1}), .num_tokens = 6},
      {.pages = Table({1, 2}), .num_tokens = 6, .local_position = 2}};
  for (const KvView& b : differ) {
    Find({{a}, {b}});
    EXPECT_THAT(shared_.ids(0), ElementsAre(0));
    EXPECT_THAT(shared_.ids(1), ElementsAre(0));
  }
}

}  // namespace
}  // namespace promptcache::worker
