#include "inference_worker/tokenizer/bpe_merger.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace promptcache::worker {
namespace {

// Random rules over a few bytes, merged by the definition: again and again the
// leftmost pair of the lowest rank.
class RandomRules {
 public:
  explicit RandomRules(uint32_t seed) : random_(seed) {
    for (int byte = 0; byte < kBytes; ++byte) {
      merger_.SetByte(static_cast<uint8_t>('a' + byte), byte);
    }
    int32_t next = kBytes;
    for (int i = 0; i < 60; ++i) {
      const auto left = static_cast<int32_t>(random_() % Unsigned(next));
      const auto right = static_cast<int32_t>(random_() % Unsigned(next));
      if (!rules_.try_emplace({left, right}, rules_.size(), next).second) {
        continue;
      }
      merger_.AddRule(left, right, next, next);
      ++next;
    }
  }

  std::vector<int32_t> ByDefinition(const std::string& piece) const {
    std::vector<int32_t> ids;
    for (const char c : piece) ids.push_back(c - 'a');
    while (true) {
      size_t best = 0;
      const std::pair<size_t, int32_t>* rule = nullptr;
      for (size_t i = 0; i + 1 < ids.size(); ++i) {
        const auto it = rules_.find({ids[i], ids[i + 1]});
        if (it == rules_.end()) continue;
        if (rule == nullptr || it->second.first < rule->first) {
          best = i;
          rule = &it->second;
        }
      }
      if (rule == nullptr) return ids;
      ids[best] = rule->second;
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
  }

  std::vector<int32_t> ByMerger(const std::string& piece) const {
    std::vector<int32_t> ids;
    merger_.Merge(piece, &ids);
    return ids;
  }

  std::string RandomPiece(size_t num_bytes) {
    std::string piece;
    while (piece.size() < num_bytes) {
      piece.push_back(static_cast<char>('a' + random_() % kBytes));
    }
    return piece;
  }

 private:
  static constexpr int kBytes = 3;
  static uint32_t Unsigned(int32_t n) { return static_cast<uint32_t>(n); }

  std::mt19937 random_;
  std::map<std::pair<int32_t, int32_t>, std::pair<size_t, int32_t>> rules_;
  BpeMerger merger_;
};

TEST(BpeMergerTest, MergesAsTheDefinitionSaysAtAnyLength) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    RandomRules rules(seed);
    for (const size_t num_bytes : {0, 1, 2, 3, 7, 31, 32, 33, 64, 300}) {
      for (int i = 0; i < 10; ++i) {
        const std::string piece = rules.RandomPiece(num_bytes);
        ASSERT_EQ(rules.ByMerger(piece), rules.ByDefinition(piece))
            << "seed " << seed << ": " << piece;
      }
    }
  }
}

TEST(BpeMergerTest, RunsOfOneLetterMergeFromTheLeft) {
  BpeMerger merger;
  merger.SetByte('a', 0);
  merger.AddRule(0, 0, 0, 1);
  merger.AddRule(1, 1, 1, 2);
  for (const size_t num_bytes : {7, 99}) {
    std::vector<int32_t> ids;
    merger.Merge(std::string(num_bytes, 'a'), &ids);
    std::vector<int32_t> expected(num_bytes / 4, 2);
    expected.push_back(1);
    expected.push_back(0);
    EXPECT_EQ(ids, expected) << num_bytes;
  }
}

TEST(BpeMergerTest, BytesWithoutATokenAreLeftOut) {
  BpeMerger merger;
  merger.SetByte('a', 0);
  merger.AddRule(0, 0, 0, 1);
  std::vector<int32_t> ids = {9};
  merger.Merge("xaxax", &ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{9, 1}));
}

TEST(BpeMergerTest, OfTwoRulesForOnePairTheFirstCounts) {
  BpeMerger merger;
  merger.SetByte('a', 0);
  merger.AddRule(0, 0, 0, 1);
  merger.AddRule(0, 0, 1, 2);
  std::vector<int32_t> ids;
  merger.Merge("aa", &ids);
  EXPECT_EQ(ids, std::vector<int32_t>{1});
}

}  // namespace
}  // namespace promptcache::worker
