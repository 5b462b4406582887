#include "tools/cli/cache_capacity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "tools/cli/cli_status.h"

namespace promptcache::cli {
namespace {

using ::testing::HasSubstr;

// 360 KiB a page of 16 tokens, as SmolLM2 135M has.
constexpr KvLayout kLayout{.num_layers = 30, .num_kv_heads = 3, .head_dim = 64};

TEST(CapacityTokensTest, CountsWholePagesOfWholeSegments) {
  EXPECT_THAT(CapacityTokens(kLayout, 360 << 10), IsOkAndHolds(16u));
  EXPECT_THAT(CapacityTokens(kLayout, 1 << 20), IsOkAndHolds(2 * 16u));
  // 182 pages in each segment, and 8 KiB of it for nobody.
  EXPECT_THAT(CapacityTokens(kLayout, 64 << 20), IsOkAndHolds(182 * 16u));
  EXPECT_THAT(CapacityTokens(kLayout, (128 << 20) + (360 << 10)),
              IsOkAndHolds(365 * 16u));
}

TEST(CapacityTokensTest, LessThanAPageIsRefusedWithTheSmallestSize) {
  for (const uint64_t memory :
       {uint64_t{0}, uint64_t{64}, uint64_t{4096}, (uint64_t{360} << 10) - 1}) {
    const auto tokens = CapacityTokens(kLayout, memory);
    EXPECT_THAT(tokens, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("16 tokens, takes 360KiB")));
    EXPECT_EQ(ExitCodeOf(tokens.status()), kExitUsage);
    EXPECT_THAT(std::string(tokens.status().message()),
                HasSubstr("--memory: "));
  }
}

}  // namespace
}  // namespace promptcache::cli
