// Prompts without schema as clients see them: what is retained of them, and
// registered modules that are found in them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/inference_worker/serving/worker_server_fixture.h"

namespace promptcache::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What match auto finds.
constexpr char kModuleText[] = "These are the rules of the house, all of them.";
constexpr char kLongModule[] =
    "<schema name=\"s\"><module name=\"m\">These are the rules of the house, "
    "all of them.</module></schema>";

class PlainPromptTest : public WorkerServerTest {
 protected:
  // Of kLongModule's schema, which AUTO finds.
  static v1::GenerateRequest LongModuleAndQuestion() {
    v1::GenerateRequest request;
    request.mutable_prompt()->set_text(std::string(kModuleText) + " So?");
    request.set_max_tokens(100);
    request.set_ignore_eos(true);
    request.set_match(v1::MATCH_AUTO);
    return request;
  }
};

TEST_F(PlainPromptTest, WhyAPromptCannotBeRetainedIsSaid) {
  ASSERT_TRUE(Put(kSchema).ok());
  v1::GenerateRequest request = Pml("x");
  request.mutable_retain();
  EXPECT_THAT(StatusOf(Generate(request)).message(),
              HasSubstr("a schema keeps its modules itself"));
  request.mutable_prompt()->set_text("x");
  request.set_match(v1::MATCH_NONE);
  EXPECT_THAT(StatusOf(Generate(request)).message(),
              HasSubstr("not with match none"));
}

TEST_F(PlainPromptTest, WhatIsRetainedIsMatchedToNoSchema) {
  ASSERT_TRUE(Put(kLongModule).ok());
  v1::GenerateRequest request = LongModuleAndQuestion();
  EXPECT_EQ(Generate(request).started.matched_schema(), "s");
  request.mutable_retain();
  const Answer kept = Generate(request);
  PC_ASSERT_OK(StatusOf(kept));
  EXPECT_EQ(kept.started.matched_schema(), "");
  EXPECT_EQ(kept.completed.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_GT(kept.completed.usage().retained_tokens(), 0u);
}

TEST_F(PlainPromptTest, ATextIsReadAsFarAsItWasRetained) {
  v1::GenerateRequest request;
  std::string text;
  for (int i = 0; i < 30; ++i) text += "line " + std::to_string(i) + ". ";
  request.mutable_prompt()->set_text(text);
  request.set_max_tokens(70);
  request.set_ignore_eos(true);
  request.mutable_retain()->mutable_ttl()->set_seconds(60);
  const Answer first = Generate(request);
  ASSERT_TRUE(first.status.ok());
  const v1::Usage& usage = first.completed.usage();
  EXPECT_GT(usage.created_tokens(), 64u);
  EXPECT_EQ(usage.retained_tokens(), (usage.prompt_tokens() + 69) / 64 * 64);
  EXPECT_EQ(first.completed.exactness(), v1::EXACTNESS_EXACT);
  request.clear_retain();
  request.mutable_prompt()->set_text(text + first.text + "?");
  const Answer second = Generate(request);
  EXPECT_GE(second.completed.usage().cached_tokens(), usage.created_tokens());
  request.set_match(v1::MATCH_NONE);
  const Answer none = Generate(request);
  EXPECT_EQ(none.completed.usage().cached_tokens(), 0u);
  EXPECT_EQ(none.text, second.text);
}

TEST_F(PlainPromptTest, ATextIsReadAsModulesOrAsRetainedByWhatIsLonger) {
  ASSERT_TRUE(Put(kLongModule).ok());
  v1::GenerateRequest request;
  std::string text = std::string("Read this: ") + kModuleText;
  for (int i = 0; i < 60; ++i) text += " line " + std::to_string(i) + ".";
  request.mutable_prompt()->set_text(text);
  request.set_max_tokens(5);
  request.set_match(v1::MATCH_AUTO);
  for (int i = 0; i < 2; ++i) {
    const Answer modular = Generate(request);
    EXPECT_EQ(modular.started.matched_schema(), "s");
    EXPECT_EQ(modular.completed.exactness(), v1::EXACTNESS_MODULAR);
  }
  v1::GenerateRequest retaining = request;
  retaining.clear_match();
  retaining.mutable_retain();
  const Answer kept = Generate(retaining);
  ASSERT_GT(kept.completed.usage().created_tokens(), 64u);
  const Answer read = Generate(request);
  EXPECT_EQ(read.started.matched_schema(), "");
  EXPECT_EQ(read.completed.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_EQ(read.completed.usage().cached_tokens(),
            kept.completed.usage().created_tokens());
  EXPECT_EQ(read.text, kept.text);
  // It is counted as it would be read.
  v1::CountTokensRequest count;
  *count.mutable_prompt() = request.prompt();
  count.set_match(v1::MATCH_AUTO);
  v1::CountTokensResponse counted;
  grpc::ClientContext context;
  ASSERT_TRUE(inference_->CountTokens(&context, count, &counted).ok());
  EXPECT_EQ(counted.exactness(), v1::EXACTNESS_EXACT);
  EXPECT_EQ(counted.cacheable_tokens(), read.completed.usage().cached_tokens());
}

TEST_F(PlainPromptTest, AWorkerMayRetainWhatDoesNotSay) {
  retain_ttl_ = absl::Minutes(7);
  Serve({});
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("on and on");
  request.set_max_tokens(100);
  request.set_ignore_eos(true);
  const auto retained = [&] {
    const Answer answer = Generate(request);
    PC_EXPECT_OK(StatusOf(answer));
    EXPECT_THAT(answer.completed.notices(), IsEmpty());
    return answer.completed.usage().retained_tokens();
  };
  // Who says no, or can leave nothing there, leaves nothing, without a word.
  request.set_no_retain(true);
  EXPECT_EQ(retained(), 0u);
  request.clear_no_retain();
  request.set_match(v1::MATCH_NONE);
  EXPECT_EQ(retained(), 0u);
  request.clear_match();
  request.set_cache_mode(v1::CACHE_MODE_READ_ONLY);
  EXPECT_EQ(retained(), 0u);
  request.clear_cache_mode();
  request.set_attention(v1::ATTENTION_MODE_FULL);
  EXPECT_EQ(retained(), 0u);
  request.clear_attention();
  request.set_max_tokens(5);
  EXPECT_EQ(retained(), 0u);
  EXPECT_EQ(cache_.num_modules(), 0u);

  request.set_max_tokens(100);
  EXPECT_EQ(retained(), 64u);
  request.mutable_prompt()->set_text("on and off");
  request.mutable_retain()->mutable_ttl()->set_seconds(60);
  EXPECT_EQ(retained(), 64u);
  const std::vector<CommitModule> committed = cache_.committed();
  ASSERT_EQ(committed.size(), 2u);
  EXPECT_EQ(committed[0].ttl, absl::Minutes(7));
  EXPECT_EQ(committed[1].ttl, absl::Minutes(1));
}

TEST_F(PlainPromptTest, WhatAutoMatchedIsNotRetainedByDefault) {
  retain_ttl_ = absl::InfiniteDuration();
  Serve({});
  ASSERT_TRUE(Put(kLongModule).ok());
  v1::GenerateRequest request = LongModuleAndQuestion();
  const Answer matched = Generate(request);
  EXPECT_EQ(matched.started.matched_schema(), "s");
  EXPECT_EQ(matched.completed.usage().retained_tokens(), 0u);
  request.clear_match();
  EXPECT_GT(Generate(request).completed.usage().retained_tokens(), 0u);
  WorkerServer::Options options;
  options.inference.retain_ttl = absl::Seconds(-1);
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("--retain_ttl=-1s")));
}

TEST_F(PlainPromptTest, SchemasToMatchAreThoseRegisteredLast) {
  registry_.SetPageSize(2);
  for (const std::string name : {"c", "a", "e", "b", "d"}) {
    ASSERT_TRUE(Put("<schema name=\"" + name + "\">Text.</schema>").ok());
  }
  EXPECT_THAT(source_.List(3), IsOkAndHolds(ElementsAre("d", "b", "e")));
  ASSERT_TRUE(Put("<schema name=\"c\">Other.</schema>").ok());
  EXPECT_THAT(source_.List(2), IsOkAndHolds(ElementsAre("c", "d")));
  EXPECT_THAT(source_.List(9),
              IsOkAndHolds(ElementsAre("c", "d", "b", "e", "a")));
}

}  // namespace
}  // namespace promptcache::worker
