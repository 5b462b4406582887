#include "tools/cli/cli_status.h"

#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/rpc/grpc_status.h"

namespace promptcache::cli {
namespace {

constexpr char kExitCodeUrl[] = "promptcache/exit_code";

using Json = nlohmann::ordered_json;

// "the prompt, line 3, column 5: " when the error names a place.
std::string Place(const rpc::ErrorInfo& info) {
  const auto source = info.metadata.find("source");
  if (source == info.metadata.end()) return "";
  std::string place = absl::StrCat("the ", source->second);
  for (const char* key : {"line", "column"}) {
    const auto it = info.metadata.find(key);
    if (it != info.metadata.end() && it->second != "0") {
      absl::StrAppend(&place, ", ", key, " ", it->second);
    }
  }
  return place + ": ";
}

void SayInWords(const absl::Status& status) {
  std::cerr << "promptcache: ";
  const auto info = rpc::GetErrorInfo(status);
  if (info.has_value()) std::cerr << Place(*info);
  std::cerr << status.message();
  if (info.has_value() && !info->reason.empty()) {
    std::cerr << " [" << info->reason << "]";
  }
  std::cerr << "\n";
  for (const auto& violation : rpc::GetFieldViolations(status)) {
    std::cerr << "  " << violation.field << ": " << violation.description
              << "\n";
  }
  if (const auto delay = rpc::GetRetryDelay(status)) {
    std::cerr << "  try again in " << absl::FormatDuration(*delay) << "\n";
  }
}

Json ErrorJson(const absl::Status& status) {
  Json error{{"code", absl::StatusCodeToString(status.code())},
             {"message", std::string(status.message())}};
  if (const auto info = rpc::GetErrorInfo(status)) {
    error["reason"] = info->reason;
    for (const auto& [key, value] : info->metadata) {
      int64_t number;
      if (absl::SimpleAtoi(value, &number)) {
        error[key] = number;
      } else {
        error[key] = value;
      }
    }
  }
  for (const auto& violation : rpc::GetFieldViolations(status)) {
    error["fields"].push_back(
        {{"field", violation.field}, {"description", violation.description}});
  }
  if (const auto delay = rpc::GetRetryDelay(status)) {
    error["retry_delay_s"] = absl::ToDoubleSeconds(*delay);
  }
  return Json{{"error", error}};
}

}  // namespace

absl::Status WithExitCode(absl::Status status, ExitCode code) {
  status.SetPayload(kExitCodeUrl,
                    absl::Cord(absl::string_view(absl::StrCat(int{code}))));
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitOk;
  const auto payload = status.GetPayload(kExitCodeUrl);
  int code;
  if (payload.has_value() && absl::SimpleAtoi(std::string(*payload), &code)) {
    return static_cast<ExitCode>(code);
  }
  return kExitFailed;
}

absl::Status UsageError(const std::string& message) {
  return WithExitCode(absl::InvalidArgumentError(message), kExitUsage);
}

int Report(const absl::Status& status, bool json) {
  if (status.ok()) return kExitOk;
  std::cout.flush();
  SayInWords(status);
  if (json) {
    std::cout << ErrorJson(status).dump(2, ' ', false,
                                        Json::error_handler_t::replace)
              << "\n";
  }
  return ExitCodeOf(status);
}

}  // namespace promptcache::cli
