#include "inference_worker/serving/fair_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<size_t> Share(size_t budget, std::vector<RowsWanted> wanted,
                          size_t turn = 0) {
  return ShareRows(budget, wanted, turn);
}

size_t Next(const std::vector<std::string_view>& waiting,
            const std::vector<std::string_view>& running) {
  return NextToAdmit(waiting, running);
}

TEST(MayEnterTest, ADomainBelowItsShareIsNotLockedOut) {
  EXPECT_TRUE(MayEnter(/*places=*/8, 7, 7, 1));
  EXPECT_FALSE(MayEnter(8, 8, 8, 1));
  EXPECT_TRUE(MayEnter(8, 8, 0, 2));   // another's requests fill them all
  EXPECT_TRUE(MayEnter(8, 11, 3, 2));  // up to its half
  EXPECT_FALSE(MayEnter(8, 12, 4, 2));
  EXPECT_FALSE(MayEnter(8, 16, 0, 2));  // there is an end to it
  EXPECT_FALSE(MayEnter(8, 8, 0, 9));   // nor is there a share to be had
}

TEST(MayEnterTest, ThereIsAMostThatEnter) {
  for (const uint32_t places : {1u, 2u, 7u, 8u, 80u}) {
    uint32_t most = 0;
    // Domains come one after another, each with all that it may have.
    for (uint32_t domains = 1; domains < 99; ++domains) {
      for (uint32_t own = 0; MayEnter(places, most, own, domains); ++own) {
        ++most;
      }
    }
    EXPECT_LE(most, MostThatEnter(places)) << places;
    // Reached where enough domains have a share.
    if (places >= 8) {
      EXPECT_EQ(most, MostThatEnter(places)) << places;
    }
  }
  EXPECT_GT(MostThatEnter(0xFFFFFFFFu), 0xFFFFFF00u);
}

TEST(NextToPreemptTest, TheYoungestOfTheDomainWithMostRunning) {
  const auto next = [](std::vector<RunningRequest> running) {
    return NextToPreempt(running);
  };
  EXPECT_EQ(next({}), std::nullopt);
  EXPECT_EQ(next({{"a", true}, {"a", true}, {"a", true}}), 2u);
  EXPECT_EQ(next({{"a", true}, {"a", true}, {"b", true}}), 1u);
  EXPECT_EQ(next({{"a", true}, {"b", true}}), 1u);
  // Who cannot wait counts for its domain, and is not taken.
  EXPECT_EQ(next({{"a", true}, {"a", false}, {"b", true}}), 0u);
  EXPECT_EQ(next({{"a", false}, {"a", false}, {"b", true}}), 2u);
  EXPECT_EQ(next({{"a", false}}), std::nullopt);
}

TEST(NextToAdmitTest, TheFirstOfTheDomainWithFewestRunning) {
  EXPECT_EQ(Next({"a", "a", "b"}, {}), 0u);
  EXPECT_EQ(Next({"a", "a", "b"}, {"a"}), 2u);
  EXPECT_EQ(Next({"a", "a", "b"}, {"a", "b"}), 0u);
  EXPECT_EQ(Next({"a", "a"}, {"a", "a", "a"}), 0u);
  EXPECT_EQ(Next({"a", "c", "b"}, {"a", "b", "b"}), 1u);
}

TEST(ShareRowsTest, OneDomainSharesEvenly) {
  EXPECT_THAT(Share(20, {{"a", 200}}), ElementsAre(20));
  EXPECT_THAT(Share(20, {{"a", 5}, {"a", 180}}), ElementsAre(5, 15));
  EXPECT_THAT(Share(21, {{"a", 90}, {"a", 90}, {"a", 90}}),
              ElementsAre(7, 7, 7));
  EXPECT_THAT(Share(5, {}), IsEmpty());
}

TEST(ShareRowsTest, DomainsShareFirst) {
  EXPECT_THAT(Share(20, {{"a", 90}, {"a", 90}, {"a", 90}, {"b", 90}}),
              ElementsAre(4, 3, 3, 10));
  // What one does not need the other has.
  EXPECT_THAT(Share(20, {{"a", 90}, {"a", 90}, {"b", 2}}),
              ElementsAre(9, 9, 2));
}

TEST(ShareRowsTest, NobodyStarvesWhereThereIsLessThanARowForEach) {
  std::vector<size_t> total(5, 0);
  for (size_t turn = 0; turn < 10; ++turn) {
    const auto given =
        Share(2, {{"a", 9}, {"a", 9}, {"a", 9}, {"a", 9}, {"a", 9}}, turn);
    EXPECT_EQ(std::accumulate(given.begin(), given.end(), size_t{0}), 2u);
    for (size_t i = 0; i < given.size(); ++i) total[i] += given[i];
  }
  EXPECT_THAT(total, ElementsAre(4, 4, 4, 4, 4));
}

TEST(ShareRowsTest, NeverMoreThanTheBudgetNorThanIsWanted) {
  for (size_t budget = 0; budget < 40; ++budget) {
    const std::vector<RowsWanted> wanted = {{"a", 3}, {"b", 11}, {"a", 7},
                                            {"c", 1}, {"b", 2},  {"a", 6}};
    const auto given = Share(budget, wanted, budget);
    size_t total = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      EXPECT_LE(given[i], wanted[i].rows);
      total += given[i];
    }
    EXPECT_LE(total, budget);
    if (budget >= 30) {
      EXPECT_EQ(total, 30u);
    }
  }
}

}  // namespace
}  // namespace promptcache::worker
