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
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("x")), kExitRefused);
  EXPECT_EQ(
      ExitCodeOf(WithExitCode(absl::UnavailableError("x"), kExitUnreachable)),
      kExitUnreachable);
}

absl::Status PmlFault() {
  absl::Status status = absl::InvalidArgumentError(
      "PML_UNKNOWN_MODULE in prompt, line 3, column 5: no module \"q\"");
  rpc::SetErrorInfo({.reason = "PML_UNKNOWN_MODULE",
                     .metadata = {{"source", "prompt"},
                                  {"line", "3"},
                                  {"column", "5"},
                                  {"detail", "no module \"q\""}}},
                    &status);
  return WithExitCode(status, kExitRefused);
}

TEST(CliStatusTest, AReportNamesThePlaceOfAPmlFaultOnce) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Report(PmlFault(), /*json=*/true), kExitRefused);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "promptcache: the prompt, line 3, column 5: no module \"q\" "
            "[PML_UNKNOWN_MODULE]\n");
  const auto json =
      nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json["error"]["reason"], "PML_UNKNOWN_MODULE");
  EXPECT_EQ(json["error"]["line"], 3);
  EXPECT_EQ(json["error"]["code"], "INVALID_ARGUMENT");
  EXPECT_FALSE(json["error"].contains("file"));
}

TEST(CliStatusTest, AReportNamesTheFile) {
  absl::Status status = NamingFile(PmlFault(), "schema", "schema.xml");
  status = NamingFile(std::move(status), "prompt", "my.xml");
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Report(status, /*json=*/true), kExitRefused);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "promptcache: my.xml:3:5: no module \"q\" "
            "[PML_UNKNOWN_MODULE]\n");
  const auto json =
      nlohmann::json::parse(::testing::internal::GetCapturedStdout());
  EXPECT_EQ(json["error"]["file"], "my.xml");
}

TEST(CliStatusTest, AFaultOfAFieldIsSaidOnce) {
  const auto said = [](const absl::Status& status) {
    ::testing::internal::CaptureStderr();
    Report(status, /*json=*/false);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(rpc::InvalidFieldError("max_tokens", "is 0")),
            "promptcache: max_tokens: is 0\n");
  absl::Status status = absl::InvalidArgumentError("two faults");
  rpc::SetFieldViolations({{"a", "x"}, {"b", "y"}}, &status);
  EXPECT_EQ(said(status), "promptcache: two faults\n  a: x\n  b: y\n");
}

}  // namespace
}  // namespace promptcache::cli
