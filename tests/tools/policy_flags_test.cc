#include "tools/cli/policy_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache::cli {
namespace {

TEST(PolicyFlagsTest, ATtlIsSecondsAndNanoseconds) {
  v1::CachePolicy policy;
  PC_ASSERT_OK(SetTtl("1m30.25s", &policy));
  EXPECT_EQ(policy.ttl().seconds(), 90);
  EXPECT_EQ(policy.ttl().nanos(), 250'000'000);
}

TEST(PolicyFlagsTest, WhatIsNoTimeOrForEverIsAUsageError) {
  for (const char* text : {"", "90", "0s", "-1s", "inf", "soon"}) {
    v1::CachePolicy policy;
    EXPECT_THAT(SetTtl(text, &policy),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         testing::HasSubstr("is not a time to live")))
        << text;
    EXPECT_FALSE(policy.has_ttl()) << text;
  }
}

}  // namespace
}  // namespace promptcache::cli
