#include "inference_worker/tokenizer/vector_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;

// Ids are bytes.
class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
    return ids;
  }
  std::string Decode(int32_t id) const override {
    return std::string(1, static_cast<char>(id));
  }
  int32_t ControlToken(std::string_view) const override { return -1; }
  int32_t bos_id() const override { return -1; }
  int32_t vocab_size() const override { return 256; }
  const std::vector<int32_t>& stop_ids() const override { return stop_ids_; }
  const Digest& digest() const override { return digest_; }

 private:
  std::vector<int32_t> stop_ids_;
  Digest digest_;
};

std::string DifferenceIn(std::string_view line) {
  const auto results = CheckTokenizerVectors(line, ByteTokenizer());
  EXPECT_THAT(results, IsOk());
  EXPECT_EQ(results->size(), 1u);
  return results->at(0).difference;
}

TEST(VectorCheckTest, AllFormsPassWhenEqual) {
  const auto results = CheckTokenizerVectors(
      R"({"text": "ab", "ids": [97, 98]}

{"repeat": ["ab", 2], "ids": [97, 98, 97, 98]}
{"repeat": ["a", 500], "ids_rle": [[97, 499], [97, 1]]}
{"bytes_hex": "61ff", "ids": [97, 255], "note": "of no account"}
{"decode_ids": [97, 255], "bytes_hex": "61FF"})",
      ByteTokenizer());
  PC_ASSERT_OK(results);
  ASSERT_EQ(results->size(), 5u);
  for (const CaseResult& result : *results) {
    EXPECT_EQ(result.difference, "") << result.name;
  }
  EXPECT_EQ(results->at(1).name,
            R"(line 3: {"repeat": ["ab", 2], "ids": [97, 98, 97, 98]})");
}

TEST(VectorCheckTest, TellsTheFirstDifference) {
  EXPECT_EQ(DifferenceIn(R"({"text": "abc", "ids": [97, 7, 9]})"),
            "token 1: expected 7, got 98 (of 3 expected, 3 got)");
  EXPECT_EQ(DifferenceIn(R"({"text": "abc", "ids": [97, 98]})"),
            "token 2: expected no more, got 99 (of 2 expected, 3 got)");
  EXPECT_EQ(DifferenceIn(R"({"repeat": ["a", 2], "ids_rle": [[97, 3]]})"),
            "token 2: expected 97, got no more (of 3 expected, 2 got)");
  EXPECT_EQ(DifferenceIn(R"({"decode_ids": [97], "bytes_hex": "6162"})"),
            "byte 1: expected 6162, got 61");
}

TEST(VectorCheckTest, WhatIsNotAVectorIsRefusedWithItsLine) {
  for (const char* line :
       {"[]", "{", "{}", R"({"text": "a"})", R"({"text": 1, "ids": []})",
        R"({"text": "a", "ids": ["1"]})", R"({"text": "a", "ids": [9e99]})",
        R"({"text": "a", "ids": [4294967296]})",
        R"({"repeat": ["a"], "ids": []})",
        R"({"repeat": ["a", -1], "ids": []})",
        R"({"repeat": ["a", 99999999999], "ids": []})",
        R"({"text": "a", "ids_rle": [[1, 67000000], [1, 67000000]]})",
        R"({"text": "a", "ids_rle": [[99999999999, 1]]})",
        R"({"bytes_hex": "6", "ids": []})", R"({"bytes_hex": "6g", "ids": []})",
        R"({"decode_ids": [1]})"}) {
    const std::string text =
        std::string(R"({"text": "", "ids": []})") + "\n" + line;
    EXPECT_THAT(
        CheckTokenizerVectors(text, ByteTokenizer()),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 2: ")))
        << line;
  }
}

}  // namespace
}  // namespace promptcache::worker
