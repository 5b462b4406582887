#include "common/port_file.h"

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace promptcache {

absl::Status WritePortFile(const std::string& path, int port) {
  if (path.empty()) return absl::OkStatus();
  const std::string part = path + ".part";
  const auto failed = [&path](int error) {
    return absl::ErrnoToStatus(error, absl::StrCat("port file ", path));
  };
  std::FILE* const file = std::fopen(part.c_str(), "w");
  if (file == nullptr) return failed(errno);
  const bool printed = std::fprintf(file, "%d\n", port) > 0;
  const int print_error = errno;
  if (std::fclose(file) != 0) return failed(errno);
  if (!printed) return failed(print_error);
  if (std::rename(part.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int rename_error = errno;
  std::remove(part.c_str());
  return failed(rename_error);
}

}  // namespace promptcache
