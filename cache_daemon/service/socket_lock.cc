#include "cache_daemon/service/socket_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace promptcache::daemon {
namespace {

std::string FolderOf(const std::string& socket_path) {
  const std::string folder =
      std::filesystem::path(socket_path).parent_path().string();
  return folder.empty() ? "." : folder;
}

std::string Holder(int fd) {
  std::array<char, 32> text{};
  const ssize_t num_bytes = ::pread(fd, text.data(), text.size() - 1, 0);
  const std::string pid(
      absl::StripAsciiWhitespace(num_bytes > 0 ? text.data() : ""));
  return pid.empty() ? "" : absl::StrCat(" (process ", pid, ")");
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

absl::StatusOr<SocketLock> SocketLock::Take(const std::string& socket_path) {
  const std::string path = socket_path + ".lock";
  UniqueFd fd(
      ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0640));
  if (!fd) return absl::ErrnoToStatus(errno, path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, path);
    return absl::FailedPreconditionError(
        absl::StrCat("another daemon", Holder(fd.get()), " serves ",
                     socket_path, ": stop it, or choose another --socket"));
  }
  const std::string pid = absl::StrCat(::getpid(), "\n");
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
    return absl::ErrnoToStatus(errno, path);
  }
  return SocketLock(std::move(fd));
}

}  // namespace promptcache::daemon
