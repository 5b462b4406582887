#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

// The one place where absl::Status becomes grpc::Status and back. Details of
// the google.rpc kind ride along: as payloads of the absl::Status (so that code
// without gRPC passes them through untouched), and on the wire as a serialised
// google.rpc.Status in the trailer `grpc-status-details-bin`, where every
// gRPC client library finds them.
//
// Free functions, thread-safe.
namespace promptcache::rpc {

inline constexpr char kErrorDomain[] = "promptcache";
// A trailer that does not fit into the peer's metadata limit (8 KiB by
// default) would turn every error into RESOURCE_EXHAUSTED: messages are cut,
// and details that are larger are left out.
inline constexpr size_t kMaxMessageBytes = 2048;
inline constexpr size_t kMaxDetailsBytes = 5120;

// google.rpc.ErrorInfo. For a PML fault: reason "PML_*", metadata "source"
// ("schema" or "prompt"), "line", "column", and its numbers by name
// ("tokens", "limit", …), all in decimal.
struct ErrorInfo {
  std::string reason;
  std::string domain = kErrorDomain;
  std::map<std::string, std::string> metadata;
};

// google.rpc.BadRequest: which field of the request is at fault.
struct FieldViolation {
  std::string field;
  std::string description;
};

// Each replaces the detail of its kind. No effect on an OK status.
void SetErrorInfo(const ErrorInfo& info, absl::Status* status);
void SetRetryDelay(absl::Duration delay, absl::Status* status);
void SetFieldViolations(const std::vector<FieldViolation>& violations,
                        absl::Status* status);

std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status);
std::optional<absl::Duration> GetRetryDelay(const absl::Status& status);
// Empty when there are none.
std::vector<FieldViolation> GetFieldViolations(const absl::Status& status);

// InvalidArgument with one FieldViolation; the message is "field: description".
absl::Status InvalidFieldError(const std::string& field,
                               const std::string& description);

// Codes are the same numbers on both sides. Payloads whose type URL begins
// "type.googleapis.com/" become details, in order of their URLs.
grpc::Status ToGrpcStatus(const absl::Status& status);
// The reverse; details that do not parse are dropped, an unknown code is
// kUnknown.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace promptcache::rpc
