#include "common/rpc/grpc_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tests/support/status_matchers.h"

namespace promptcache::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(GrpcStatusTest, EveryCodeKeepsItsNumber) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "words");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    EXPECT_EQ(wire.error_message(), "words");
    EXPECT_EQ(FromGrpcStatus(wire), status);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  PC_EXPECT_OK(FromGrpcStatus(grpc::Status::OK));
}

TEST(GrpcStatusTest, AnUnknownCodeBecomesUnknown) {
  const grpc::Status wire(static_cast<grpc::StatusCode>(20), "odd");
  EXPECT_THAT(FromGrpcStatus(wire),
              StatusIs(absl::StatusCode::kUnknown, HasSubstr("odd")));
}

TEST(GrpcStatusTest, DetailsTravelInThePublishedWireForm) {
  absl::Status status = absl::InvalidArgumentError("module unknown");
  SetErrorInfo({.reason = "PML_UNKNOWN_MODULE",
                .metadata = {{"source", "prompt"}, {"line", "3"}}},
               &status);
  const grpc::Status wire = ToGrpcStatus(status);

  google::rpc::Status parsed;
  ASSERT_TRUE(parsed.ParseFromString(wire.error_details()));
  EXPECT_EQ(parsed.code(), 3);
  EXPECT_EQ(parsed.message(), "module unknown");
  ASSERT_EQ(parsed.details_size(), 1);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(parsed.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "PML_UNKNOWN_MODULE");
  EXPECT_EQ(info.domain(), "promptcache");
  EXPECT_EQ(info.metadata().at("line"), "3");
}

TEST(GrpcStatusTest, AllDetailsComeBackFromTheWire) {
  absl::Status status = absl::ResourceExhaustedError("queue full");
  SetErrorInfo({.reason = "QUEUE_FULL", .metadata = {{"limit", "64"}}},
               &status);
  SetRetryDelay(absl::Milliseconds(1250), &status);
  SetFieldViolations({{"prompt.pml", "empty"}, {"max_tokens", "too many"}},
                     &status);
  const absl::Status back = FromGrpcStatus(ToGrpcStatus(status));

  const auto info = GetErrorInfo(back);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason, "QUEUE_FULL");
  EXPECT_EQ(info->domain, kErrorDomain);
  EXPECT_THAT(info->metadata, ElementsAre(Pair("limit", "64")));
  EXPECT_EQ(GetRetryDelay(back), absl::Milliseconds(1250));
  const auto violations = GetFieldViolations(back);
  ASSERT_EQ(violations.size(), 2u);
  EXPECT_EQ(violations[0].field, "prompt.pml");
  EXPECT_EQ(violations[1].description, "too many");
}

TEST(GrpcStatusTest, SettingADetailAgainReplacesIt) {
  absl::Status status = absl::InternalError("x");
  SetErrorInfo({.reason = "FIRST"}, &status);
  SetErrorInfo({.reason = "SECOND"}, &status);
  EXPECT_EQ(GetErrorInfo(status)->reason, "SECOND");
}

TEST(GrpcStatusTest, AStatusWithoutDetailsHasNone) {
  const absl::Status status = absl::InternalError("x");
  EXPECT_FALSE(GetErrorInfo(status).has_value());
  EXPECT_FALSE(GetRetryDelay(status).has_value());
  EXPECT_THAT(GetFieldViolations(status), IsEmpty());
  EXPECT_THAT(ToGrpcStatus(status).error_details(), IsEmpty());
  absl::Status ok;
  SetErrorInfo({.reason = "NEVER"}, &ok);
  PC_EXPECT_OK(ok);
}

TEST(GrpcStatusTest, PayloadsOfOtherKindsStayInTheProcess) {
  absl::Status status = absl::InternalError("x");
  status.SetPayload("promptcache/private", absl::Cord("secret"));
  EXPECT_THAT(ToGrpcStatus(status).error_details(), IsEmpty());
}

TEST(GrpcStatusTest, DamagedDetailsAreDropped) {
  const grpc::Status wire(grpc::StatusCode::INTERNAL, "x", "\xff\xff\xff");
  const absl::Status status = FromGrpcStatus(wire);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInternal, "x"));
  EXPECT_FALSE(GetErrorInfo(status).has_value());
}

TEST(GrpcStatusTest, WhatWouldNotFitIntoATrailerIsCut) {
  // Two bytes a character, so that the limit falls inside one.
  std::string message = "x";
  for (int i = 0; i < 3000; ++i) message += "\xc3\xa9";
  absl::Status status = absl::InternalError(message);
  SetErrorInfo({.reason = "BIG", .metadata = {{"m", std::string(9000, 'm')}}},
               &status);
  const grpc::Status wire = ToGrpcStatus(status);
  EXPECT_EQ(wire.error_message(), message.substr(0, kMaxMessageBytes - 1));
  EXPECT_THAT(wire.error_details(), IsEmpty());
}

TEST(GrpcStatusTest, InvalidFieldNamesTheField) {
  const absl::Status status = InvalidFieldError("page_size", "above 1000");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                               "page_size: above 1000"));
  EXPECT_EQ(GetFieldViolations(status).at(0).field, "page_size");
}

}  // namespace
}  // namespace promptcache::rpc
