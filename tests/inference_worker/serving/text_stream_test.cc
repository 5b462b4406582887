#include "inference_worker/serving/text_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "inference_worker/serving/token_stream.h"
#include "tests/inference_worker/serving/serving_fixture.h"

namespace promptcache::worker {
namespace {

std::string Stream(StopFilter* filter, const std::string& text, size_t cut) {
  std::string shown;
  for (size_t i = 0; i < text.size() && !filter->stopped(); i += cut) {
    shown += filter->Push(text.substr(i, cut));
    // Never a part of a stop string at the end of what was shown.
    EXPECT_EQ(shown.find("STOP"), std::string::npos);
  }
  return shown + filter->Finish();
}

TEST(StopFilterTest, EndsBeforeAStopStringHoweverTheTextIsCut) {
  for (size_t cut = 1; cut < 12; ++cut) {
    StopFilter filter({"STOP", "never"});
    EXPECT_EQ(Stream(&filter, "go on STSTOP and on", cut), "go on ST");
    EXPECT_EQ(filter.stop_string(), "STOP");
  }
}

TEST(StopFilterTest, TheFirstToBeCompleteWins) {
  for (size_t cut = 1; cut < 6; ++cut) {
    StopFilter filter({"abcd", "bc", "abc"});
    EXPECT_EQ(Stream(&filter, "xabcd", cut), "x");
    EXPECT_EQ(filter.stop_string(), "abc");
  }
}

TEST(StopFilterTest, HoldsBackAndThenShowsWhatOnlyLookedLikeOne) {
  StopFilter filter({"\n\nUser:"});
  EXPECT_EQ(filter.Push("Hi\n"), "Hi");
  EXPECT_EQ(filter.Push("\nUs"), "");
  EXPECT_EQ(filter.Push("e it"), "\n\nUse it");
  EXPECT_EQ(filter.Push("\n"), "");
  EXPECT_EQ(filter.Finish(), "\n");
  EXPECT_FALSE(filter.stopped());
}

TEST(StopFilterTest, WithoutStopStringsNothingIsHeldBack) {
  StopFilter filter({});
  EXPECT_EQ(filter.Push("abc"), "abc");
  EXPECT_EQ(filter.Finish(), "");
}

// Logits that make `id` the best.
std::vector<float> Best(int32_t id) {
  std::vector<float> logits(64, 0.0f);
  logits[static_cast<size_t>(id)] = 5.0f;
  return logits;
}

class TokenStreamTest : public ::testing::Test {
 protected:
  TokenStreamTest() {
    PlanBuilder b(1);
    b.PlaceFresh(0, {1, 2, 3});
    request_ = Request(b.Build(), 4);
    request_.ignore_eos = false;
  }
  LetterTokenizer tokenizer_;
  GenerationRequest request_;
};

TEST_F(TokenStreamTest, AnEndTokenStopsAndIsNotShown) {
  TokenStream stream(&tokenizer_, request_, 100);
  EXPECT_EQ(stream.Next(Best(5)).text, "e");
  EXPECT_EQ(stream.Next(Best(0)).text, "");
  EXPECT_EQ(stream.finish_reason(), FinishReason::kStop);
}

TEST_F(TokenStreamTest, AnEndTokenCanBeIgnored) {
  request_.ignore_eos = true;
  TokenStream stream(&tokenizer_, request_, 100);
  for (int i = 0; i < 3; ++i) stream.Next(Best(0));
  EXPECT_FALSE(stream.finished());
  stream.Next(Best(0));
  EXPECT_EQ(stream.finish_reason(), FinishReason::kMaxTokens);
}

TEST_F(TokenStreamTest, WhatIsHeldBackComesWithTheLastToken) {
  request_.stop = {"eeeeeeeee"};
  TokenStream stream(&tokenizer_, request_, 100);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(stream.Next(Best(5)).text, "");
  EXPECT_EQ(stream.Next(Best(5)).text, "eeee");
  EXPECT_EQ(stream.finish_reason(), FinishReason::kMaxTokens);
}

TEST_F(TokenStreamTest, TheModelsRoomIsToldFromTheRequestsLimit) {
  TokenStream stream(&tokenizer_, request_, 2);
  stream.Next(Best(5));
  stream.Next(Best(5));
  EXPECT_EQ(stream.finish_reason(), FinishReason::kContext);
}

TEST_F(TokenStreamTest, LogProbabilitiesAreOfAllIds) {
  request_.top_logprobs = 2;
  TokenStream stream(&tokenizer_, request_, 100);
  const TokenEvent event = stream.Next(Best(5));
  // log(e^5 / (e^5 + 63))
  EXPECT_NEAR(event.logprob, 5 - std::log(std::exp(5.0) + 63), 1e-4);
  EXPECT_EQ(event.top.size(), 2u);
  EXPECT_NEAR(event.margin, 5.0f, 1e-6);
  EXPECT_EQ(stream.LogitsSha256().size(), 64u);
}

}  // namespace
}  // namespace promptcache::worker
