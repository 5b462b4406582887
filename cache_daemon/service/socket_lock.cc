#include "cache_daemon/service/socket_lock.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace promptcache::daemon {
namespace {

std::string FolderOf(const std::string& socket_path) {
  const std::string folder =
      std::filesystem::path(socket_path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

absl::Status MakeSocketFolder(const std::string& socket_path) {
  const std::string folder = FolderOf(socket_path);
  const std::string above = FolderOf(folder);
  std::error_code error;
  std::filesystem::create_directories(above, error);
  if (::mkdir(folder.c_str(), 0750) != 0 && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("socket folder ", folder));
  }
  struct stat info{};
  if (::stat(folder.c_str(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("socket folder ", folder));
  }
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("the socket folder ", folder, " belongs to user ",
                     info.st_uid, ", this daemon runs as ", ::geteuid()));
  }
  return absl::OkStatus();
}

absl::StatusOr<FileLock> LockSocket(const std::string& socket_path) {
  return FileLock::Take(
      socket_path + ".lock",
      {.who = "another daemon",
       .does = absl::StrCat("serves ", socket_path,
                            ": stop it, or choose another --socket")});
}

}  // namespace promptcache::daemon
