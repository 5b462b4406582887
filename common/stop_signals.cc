#include "common/stop_signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace promptcache {
namespace {

sigset_t Signals() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

StopSignals::StopSignals(const std::string& program) : program_(program) {
  const sigset_t set = Signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { Run(); });
}

StopSignals::~StopSignals() {
  {
    MutexLock lock(&mu_);
    ending_ = true;
  }
  // Blocked there: it wakes sigwait and ends nothing.
  // NOLINTNEXTLINE(bugprone-bad-signal-to-kill-thread)
  ::pthread_kill(thread_.native_handle(), SIGTERM);
  thread_.join();
}

void StopSignals::Run() {
  const sigset_t set = Signals();
  while (true) {
    int number = 0;
    ::sigwait(&set, &number);
    MutexLock lock(&mu_);
    if (ending_) return;
    if (!deferred_) {
      const std::string word =
          absl::StrCat(program_, ": signal ", number, " while starting\n");
      // Whether it could be written makes no difference to the end.
      [[maybe_unused]] const ssize_t written =
          ::write(STDERR_FILENO, word.data(), word.size());
      ::_exit(0);
    }
    signal_ = number;
    came_.SignalAll();
  }
}

void StopSignals::Defer() {
  MutexLock lock(&mu_);
  deferred_ = true;
}

int StopSignals::Wait() {
  MutexLock lock(&mu_);
  deferred_ = true;
  while (signal_ == 0) came_.Wait(&mu_);
  return signal_;
}

}  // namespace promptcache
