#include "common/rpc/grpc_status.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/rpc/duration.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace promptcache::rpc {
namespace {

// Not from a std::string: clang 19 mangles that constructor's template other
// than g++ did when Debian's libabsl was built.
absl::Cord ToCord(absl::string_view bytes) { return absl::Cord(bytes); }

constexpr char kTypePrefix[] = "type.googleapis.com/";

std::string TypeUrl(const google::protobuf::Message& message) {
  return absl::StrCat(kTypePrefix, message.GetDescriptor()->full_name());
}

void SetDetail(const google::protobuf::Message& detail, absl::Status* status) {
  if (status->ok()) return;
  status->SetPayload(TypeUrl(detail), ToCord(detail.SerializeAsString()));
}

template <typename Detail>
std::optional<Detail> GetDetail(const absl::Status& status) {
  Detail detail;
  const absl::optional<absl::Cord> payload = status.GetPayload(TypeUrl(detail));
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) {
    return std::nullopt;
  }
  return detail;
}

// Not in the middle of a character: the message is a proto string as well.
std::string Cut(std::string message) {
  if (message.size() <= kMaxMessageBytes) return message;
  size_t end = kMaxMessageBytes;
  while (end > 0 && (static_cast<uint8_t>(message[end]) & 0xC0) == 0x80) --end;
  message.resize(end);
  return message;
}

}  // namespace

void SetErrorInfo(const ErrorInfo& info, absl::Status* status) {
  google::rpc::ErrorInfo detail;
  detail.set_reason(info.reason);
  detail.set_domain(info.domain);
  for (const auto& [name, value] : info.metadata) {
    (*detail.mutable_metadata())[name] = value;
  }
  SetDetail(detail, status);
}

void SetRetryDelay(absl::Duration delay, absl::Status* status) {
  google::rpc::RetryInfo detail;
  SetDuration(delay, detail.mutable_retry_delay());
  SetDetail(detail, status);
}

void SetFieldViolations(const std::vector<FieldViolation>& violations,
                        absl::Status* status) {
  google::rpc::BadRequest detail;
  for (const FieldViolation& violation : violations) {
    auto* added = detail.add_field_violations();
    added->set_field(violation.field);
    added->set_description(violation.description);
  }
  SetDetail(detail, status);
}

std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status) {
  const auto detail = GetDetail<google::rpc::ErrorInfo>(status);
  if (!detail.has_value()) return std::nullopt;
  return ErrorInfo{
      .reason = detail->reason(),
      .domain = detail->domain(),
      .metadata = {detail->metadata().begin(), detail->metadata().end()}};
}

std::optional<absl::Duration> GetRetryDelay(const absl::Status& status) {
  const auto detail = GetDetail<google::rpc::RetryInfo>(status);
  if (!detail.has_value()) return std::nullopt;
  return absl::Seconds(detail->retry_delay().seconds()) +
         absl::Nanoseconds(detail->retry_delay().nanos());
}

std::vector<FieldViolation> GetFieldViolations(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  const auto detail = GetDetail<google::rpc::BadRequest>(status);
  if (!detail.has_value()) return violations;
  for (const auto& violation : detail->field_violations()) {
    violations.push_back({violation.field(), violation.description()});
  }
  return violations;
}

absl::Status InvalidFieldError(const std::string& field,
                               const std::string& description) {
  absl::Status status =
      absl::InvalidArgumentError(absl::StrCat(field, ": ", description));
  SetFieldViolations({{field, description}}, &status);
  return status;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message = Cut(std::string(status.message()));
  std::vector<std::pair<std::string, std::string>> payloads;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (absl::StartsWith(url, kTypePrefix)) {
      payloads.emplace_back(std::string(url), std::string(value));
    }
  });
  std::sort(payloads.begin(), payloads.end());
  google::rpc::Status wire;
  wire.set_code(static_cast<int32_t>(status.code()));
  wire.set_message(message);
  for (auto& [url, value] : payloads) {
    auto* detail = wire.add_details();
    detail->set_type_url(std::move(url));
    detail->set_value(std::move(value));
  }
  const auto code = static_cast<grpc::StatusCode>(status.code());
  if (payloads.empty() || wire.ByteSizeLong() > kMaxDetailsBytes) {
    return grpc::Status(code, message);
  }
  return grpc::Status(code, message, wire.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int raw_code = static_cast<int>(status.error_code());
  const bool known = raw_code >= 1 && raw_code <= 16;
  absl::Status result(known ? static_cast<absl::StatusCode>(raw_code)
                            : absl::StatusCode::kUnknown,
                      status.error_message());
  google::rpc::Status wire;
  if (!status.error_details().empty() &&
      wire.ParseFromString(status.error_details())) {
    for (const auto& detail : wire.details()) {
      result.SetPayload(detail.type_url(), ToCord(detail.value()));
    }
  }
  return result;
}

}  // namespace promptcache::rpc
