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
constexpr char kFileUrl[] = "promptcache/file/";  // and "schema" or "prompt"

using Json = nlohmann::ordered_json;

std::string Find(const rpc::ErrorInfo& info, const char* key) {
  const auto it = info.metadata.find(key);
  return it == info.metadata.end() ? "" : it->second;
}

// The file that an error's document came from; "" when it is not known.
std::string FileOf(const absl::Status& status, const rpc::ErrorInfo& info) {
  const auto file = status.GetPayload(kFileUrl + Find(info, "source"));
  return file.has_value() ? std::string(*file) : "";
}

// "prompt.xml:3:5: ", or "the prompt, line 3, column 5: " without a file, when
// the error names a place.
std::string Place(const absl::Status& status, const rpc::ErrorInfo& info) {
  const std::string source = Find(info, "source");
  if (source.empty()) return "";
  const std::string file = FileOf(status, info);
  std::string place = file.empty() ? "the " + source : file;
  for (const char* key : {"line", "column"}) {
    const std::string number = Find(info, key);
    if (number.empty() || number == "0") continue;
    absl::StrAppend(&place, file.empty() ? absl::StrCat(", ", key, " ", number)
                                         : absl::StrCat(":", number));
  }
  return place + ": ";
}

void SayInWords(const absl::Status& status) {
  std::cerr << "promptcache: ";
  const std::string message(status.message());
  const auto info = rpc::GetErrorInfo(status);
  if (info.has_value()) {
    // The message has place and reason in it, the detail has not.
    const std::string detail = Find(*info, "detail");
    std::cerr << Place(status, *info) << (detail.empty() ? message : detail);
    if (!info->reason.empty()) std::cerr << " [" << info->reason << "]";
  } else {
    std::cerr << message;
  }
  std::cerr << "\n";
  for (const auto& violation : rpc::GetFieldViolations(status)) {
    const std::string line =
        absl::StrCat(violation.field, ": ", violation.description);
    if (line != message) std::cerr << "  " << line << "\n";
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
    const std::string file = FileOf(status, *info);
    if (!file.empty()) error["file"] = file;
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

absl::Status NamingFile(absl::Status status, const std::string& source,
                        const std::string& file) {
  if (!status.ok() && !file.empty() && file != "-") {
    status.SetPayload(kFileUrl + source, absl::Cord(absl::string_view(file)));
  }
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitOk;
  // Whoever found that it is not there.
  if (absl::IsNotFound(status)) return kExitRefused;
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
