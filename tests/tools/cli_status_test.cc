#include "tools/cli/cli_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "common/rpc/grpc_status.h"

namespace promptcache::cli {
namespace {

using ::testing::HasSubstr;

TEST(CliStatusTest, TheExitCodeRidesOnTheStatus) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), kExitOk);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("x")), kExitFailed);
  EXPECT_EQ(ExitCodeOf(UsageError("x")), kExitUsage);
  EXPECT_EQ(
      ExitCodeOf(WithExitCode(absl::UnavailableError("x"), kExitUnreachable)),
      kExitUnreachable);
}

TEST(CliStatusTest, AReportNamesThePlaceOfAPmlFault) {
  absl::Status status = absl::InvalidArgumentError("no module \"q\"");
  rpc::SetErrorInfo(
      {.reason = "PML_UNKNOWN_MODULE",
       .metadata = {{"source", "prompt"}, {"line", "3"}, {"column", "5"}}},
      &status);
  status = WithExitCode(status, kExitRefused);
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Report(status, /*json=*/true), kExitRefused);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "promptcache: the prompt, line 3, column 5: no module \"q\" "
            "[PML_UNKNOWN_MODULE]\n");
  const auto json =
      nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json["error"]["reason"], "PML_UNKNOWN_MODULE");
  EXPECT_EQ(json["error"]["line"], 3);
  EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT");
}

}  // namespace
}  // namespace promptcache::cli
