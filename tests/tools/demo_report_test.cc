#include "tools/cli/demo_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace promptcache::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

DemoPrompt Prompt() {
  DemoPrompt prompt;
  prompt.name = "documents in order";
  for (const DemoMode& mode : DemoModes()) {
    prompt.answers.push_back({.mode = mode, .text = "On Sunday."});
  }
  prompt.least_cached_tokens = 100;
  return prompt;
}

TEST(DemoFaultsTest, NoneWhenTheCacheWasReadAndAnswersAgree) {
  EXPECT_THAT(DemoFaults({Prompt(), Prompt()}), IsEmpty());
}

TEST(DemoFaultsTest, ARunThatReadNothingIsTold) {
  DemoPrompt prompt = Prompt();
  prompt.least_cached_tokens = 0;
  prompt.answers[3].completed.add_notices("no daemon");
  EXPECT_THAT(
      DemoFaults({Prompt(), prompt}),
      ElementsAre(AllOf(HasSubstr("read nothing"), HasSubstr("no daemon"))));
}

TEST(DemoFaultsTest, AnswersThatDifferAreTold) {
  DemoPrompt prompt = Prompt();
  prompt.answers[3].text = "On Monday.";
  EXPECT_THAT(DemoFaults({prompt}), ElementsAre(HasSubstr("differ")));
}

}  // namespace
}  // namespace promptcache::cli
