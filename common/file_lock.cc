#include "common/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace promptcache {
namespace {

std::string Holder(int fd) {
  std::array<char, 32> text{};
  const ssize_t num_bytes = ::pread(fd, text.data(), text.size() - 1, 0);
  const std::string pid(
      absl::StripAsciiWhitespace(num_bytes > 0 ? text.data() : ""));
  return pid.empty() ? "" : absl::StrCat(" (process ", pid, ")");
}

}  // namespace

absl::StatusOr<FileLock> FileLock::Take(const std::string& path,
                                        const Words& words) {
  UniqueFd fd(
      ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0640));
  if (!fd) return absl::ErrnoToStatus(errno, path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, path);
    return absl::FailedPreconditionError(
        absl::StrCat(words.who, Holder(fd.get()), " ", words.does));
  }
  const std::string pid = absl::StrCat(::getpid(), "\n");
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
    return absl::ErrnoToStatus(errno, path);
  }
  return FileLock(std::move(fd));
}

}  // namespace promptcache
