#include "cache_daemon/core/process_watcher.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "glog/logging.h"

namespace promptcache::daemon {
namespace {

// Linux 6.9; not in Debian 12's headers.
constexpr decltype(statfs::f_type) kPidfsMagic = 0x50494446;

// A pidfd turns readable when its process has ended.
bool HasEnded(int pidfd) {
  pollfd p{.fd = pidfd, .events = POLLIN, .revents = 0};
  return ::poll(&p, 1, 0) > 0 && p.revents != 0;
}

}  // namespace

absl::StatusOr<pid_t> PidOfPidfd(int pidfd) {
  std::ifstream in(absl::StrCat("/proc/self/fdinfo/", pidfd));
  std::string name;
  while (in >> name) {
    pid_t pid = 0;
    if (name != "Pid:" || !(in >> pid)) continue;
    if (pid <= 0) return absl::NotFoundError("the process is gone");
    return pid;
  }
  return absl::InvalidArgumentError("the descriptor is no pidfd");
}

std::optional<bool> SameProcess(int pidfd, int other) {
  struct statfs system{};
  struct stat a{};
  struct stat b{};
  if (::fstatfs(pidfd, &system) != 0 || system.f_type != kPidfsMagic ||
      ::fstat(pidfd, &a) != 0 || ::fstat(other, &b) != 0) {
    return std::nullopt;
  }
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

absl::StatusOr<std::unique_ptr<PidfdWatcher>> PidfdWatcher::Create(
    DeathFn on_death) {
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) {
    return absl::InternalError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return std::unique_ptr<PidfdWatcher>(
      new PidfdWatcher(std::move(on_death), std::move(wake)));
}

PidfdWatcher::PidfdWatcher(DeathFn on_death, UniqueFd wake)
    : on_death_(std::move(on_death)),
      wake_(std::move(wake)),
      thread_([this] { Run(); }) {}

PidfdWatcher::~PidfdWatcher() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
  }
  Wake();
  thread_.join();
}

absl::StatusOr<ProcessId> PidfdWatcher::Watch(UniqueFd pidfd, pid_t pid) {
  const absl::StatusOr<pid_t> named = PidOfPidfd(pidfd.get());
  if (absl::IsInvalidArgument(named.status())) return named.status();
  if (named.ok() && *named != pid) {
    return absl::InvalidArgumentError(
        absl::StrCat("the pidfd is process ", *named, "'s, the peer is ", pid));
  }
  ProcessId id;
  {
    MutexLock lock(&mu_);
    for (const auto& [known, watched] : watched_) {
      if (HasEnded(watched.pidfd.get())) continue;
      // A pid names one process as long as that process is not reaped, and a
      // watched one that has not ended is not. A worker in a container of its
      // own has no pid here.
      const bool same = SameProcess(watched.pidfd.get(), pidfd.get())
                            .value_or(named.ok() && watched.pid == pid);
      if (same) return known;
    }
    id = ProcessId{next_id_++};
    watched_.emplace(id, Watched{std::move(pidfd), pid});
  }
  Wake();
  return id;
}

size_t PidfdWatcher::num_watched() const {
  MutexLock lock(&mu_);
  return watched_.size();
}

void PidfdWatcher::Wake() const {
  const uint64_t one = 1;
  // Fails only when the counter is full: then the thread wakes anyway.
  [[maybe_unused]] const ssize_t ignored =
      ::write(wake_.get(), &one, sizeof(one));
}

void PidfdWatcher::Run() {
  std::vector<pollfd> polled;
  std::vector<ProcessId> ids;
  while (true) {
    polled.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
    ids.clear();
    {
      MutexLock lock(&mu_);
      if (stop_) return;
      for (const auto& [id, watched] : watched_) {
        polled.push_back(
            {.fd = watched.pidfd.get(), .events = POLLIN, .revents = 0});
        ids.push_back(id);
      }
    }
    // Only this thread closes pidfds, so that none changes while it is polled.
    if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
      LOG(ERROR) << "polling pidfds: " << std::strerror(errno);
      return;
    }
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t ignored =
        ::read(wake_.get(), &count, sizeof(count));
    for (size_t i = 0; i < ids.size(); ++i) {
      if (polled[i + 1].revents == 0) continue;
      {
        MutexLock lock(&mu_);
        watched_.erase(ids[i]);
      }
      on_death_(ids[i]);
    }
  }
}

}  // namespace promptcache::daemon
