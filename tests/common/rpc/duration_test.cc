#include "common/rpc/duration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"

namespace promptcache::rpc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

google::protobuf::Duration Proto(int64_t seconds, int32_t nanos = 0) {
  google::protobuf::Duration proto;
  proto.set_seconds(seconds);
  proto.set_nanos(nanos);
  return proto;
}

TEST(DurationTest, EveryTtlThatIsLetInCanBeSent) {
  for (const auto& proto :
       {Proto(0), Proto(0, 1), Proto(90, 999'999'999),
        Proto(kMaxTtlSeconds - 1, 999'999'999), Proto(kMaxTtlSeconds)}) {
    const auto ttl = TtlFromProto(proto, "ttl");
    PC_ASSERT_OK(ttl);
    google::protobuf::Duration sent;
    SetDuration(*ttl, &sent);
    EXPECT_EQ(sent.seconds(), proto.seconds());
    EXPECT_EQ(sent.nanos(), proto.nanos());
  }
}

TEST(DurationTest, OthersAreRefusedWithTheFieldAndBothNumbers) {
  for (const auto& proto : {Proto(kMaxTtlSeconds, 1), Proto(kMaxTtlSeconds + 1),
                            Proto(std::numeric_limits<int64_t>::max()),
                            Proto(-1), Proto(0, -1), Proto(0, 1'000'000'000)}) {
    EXPECT_THAT(
        TtlFromProto(proto, "retain.ttl"),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("retain.ttl"),
                       HasSubstr(absl::StrCat(proto.seconds(), " s and ")),
                       HasSubstr(absl::StrCat(kMaxTtlSeconds, " s")))));
  }
}

}  // namespace
}  // namespace promptcache::rpc
