#include "common/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"

namespace promptcache {
namespace {

absl::Status ErrnoStatus(int error, const std::string& what) {
  return absl::ErrnoToStatus(error, what);
}

// In the child, between fork and exec: nothing here may allocate or lock,
// since another thread of the parent may have held any lock.
[[noreturn]] void Exec(const char* program, char* const* argv, int log_fd,
                       pid_t parent, int error_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // it died before the line above
  ::setpgid(0, 0);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (log_fd >= 0) {
    ::dup2(log_fd, STDOUT_FILENO);
    ::dup2(log_fd, STDERR_FILENO);
  }
  ::close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  ::execv(program, argv);
  const int error = errno;
  // If this fails the parent sees a child that ended with 127.
  if (::write(error_fd, &error, sizeof(error)) < 0) ::_exit(127);
  ::_exit(127);
}

std::string DescribeEnd(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) {
    return absl::StrCat("exit status ", info.si_status);
  }
  return absl::StrCat("signal ", info.si_status);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const Options& options) {
  UniqueFd log;
  off_t log_begin = 0;
  if (!options.log_path.empty()) {
    log = UniqueFd(::open(options.log_path.c_str(),
                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!log) return ErrnoStatus(errno, options.log_path);
    log_begin = ::lseek(log.get(), 0, SEEK_END);
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd error_read(ends[0]);
  UniqueFd error_write(ends[1]);

  std::vector<char*> argv;
  argv.push_back(const_cast<char*>(options.program.c_str()));
  for (const std::string& arg : options.args) {
    argv.push_back(const_cast<char*>(arg.c_str()));
  }
  argv.push_back(nullptr);

  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return ErrnoStatus(errno, "fork");
  if (pid == 0) {
    Exec(options.program.c_str(), argv.data(), log.get(), parent,
         error_write.get());
  }
  error_write.Reset();
  ChildProcess child;
  child.pid_ = pid;
  child.pidfd_ = UniqueFd(
      // glibc 2.36 declares pidfd_open without extern "C"
      static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  child.log_path_ = options.log_path;
  child.log_begin_ = std::max<off_t>(log_begin, 0);  // a pipe has no offset
  int error = 0;
  ssize_t got;
  do {
    got = ::read(error_read.get(), &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  if (got == sizeof(error)) return ErrnoStatus(error, options.program);
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      log_path_(std::move(other.log_path_)),
      log_begin_(other.log_begin_),
      ended_(std::move(other.ended_)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this != &other) {
    Stop(absl::Seconds(2));
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::move(other.pidfd_);
    log_path_ = std::move(other.log_path_);
    log_begin_ = other.log_begin_;
    ended_ = std::move(other.ended_);
  }
  return *this;
}

ChildProcess::~ChildProcess() { Stop(absl::Seconds(2)); }

bool ChildProcess::Running() {
  return pid_ > 0 && !Wait(absl::ZeroDuration()).ok();
}

absl::Status ChildProcess::Signal(int signal_number) {
  if (!Running()) {
    return absl::FailedPreconditionError("the process has ended");
  }
  if (::kill(pid_, signal_number) != 0) return ErrnoStatus(errno, "kill");
  return absl::OkStatus();
}

absl::StatusOr<std::string> ChildProcess::Wait(absl::Duration timeout) {
  if (pid_ <= 0) return absl::FailedPreconditionError("no process");
  if (!ended_.empty()) return ended_;
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    // Rounded up, so that the last wait is not cut short into a busy loop.
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now() +
                                                      absl::Microseconds(999));
    pollfd p{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    ::poll(&p, 1, left_ms > 0 ? static_cast<int>(left_ms) : 0);
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) ==
            0 &&
        info.si_pid == pid_) {
      ended_ = DescribeEnd(info);
      return ended_;
    }
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("process ", pid_, " still runs"));
    }
  }
}

void ChildProcess::Stop(absl::Duration grace) {
  if (!Running()) return;
  ::kill(pid_, SIGTERM);
  ::kill(pid_, SIGCONT);  // a stopped process cannot react
  if (!Wait(grace).ok()) {
    ::kill(pid_, SIGKILL);
    Wait(absl::Seconds(10)).status().IgnoreError();  // nothing more to do
  }
}

std::string ChildProcess::Log() const {
  std::ifstream in(log_path_, std::ios::binary);
  in.seekg(log_begin_);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace promptcache
