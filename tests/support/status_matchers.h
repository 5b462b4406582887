#pragma once

#include <gmock/gmock.h>

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace promptcache {

inline const absl::Status& GetStatus(const absl::Status& s) { return s; }
template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& s) {
  return s.status();
}

// EXPECT_THAT(status_or_statusor, IsOk());
MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  const absl::Status& status = GetStatus(arg);
  if (!status.ok()) *result_listener << status.ToString();
  return status.ok();
}

// EXPECT_THAT(x, StatusIs(absl::StatusCode::kNotFound, HasSubstr("module")));
MATCHER_P2(StatusIs, code, message_matcher,
           "has status " + absl::StatusCodeToString(code) +
               " and a message that " +
               ::testing::DescribeMatcher<std::string>(message_matcher)) {
  const absl::Status& status = GetStatus(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         ::testing::ExplainMatchResult(
             message_matcher, std::string(status.message()), result_listener);
}

// EXPECT_THAT(statusor, IsOkAndHolds(Eq(3)));
MATCHER_P(
    IsOkAndHolds, value_matcher,
    "is OK and holds a value that " +
        ::testing::DescribeMatcher<typename std::decay_t<arg_type>::value_type>(
            value_matcher)) {
  if (!arg.ok()) {
    *result_listener << arg.status().ToString();
    return false;
  }
  return ::testing::ExplainMatchResult(value_matcher, *arg, result_listener);
}

}  // namespace promptcache

#define PC_ASSERT_OK(expr) ASSERT_THAT((expr), ::promptcache::IsOk())
#define PC_EXPECT_OK(expr) EXPECT_THAT((expr), ::promptcache::IsOk())
