#include "tools/cli/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <utility>

#include "absl/time/clock.h"

namespace promptcache::cli {
namespace {

sigset_t Signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (int s : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) ::sigaddset(&set, s);
  return set;
}

}  // namespace

Interrupt::Interrupt() {
  const sigset_t set = Signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { Run(); });
}

Interrupt::~Interrupt() {
  ending_.store(true);
  ::pthread_kill(thread_.native_handle(), SIGUSR1);  // wakes sigwait
  thread_.join();
}

void Interrupt::Run() {
  const sigset_t set = Signals();
  for (;;) {
    int signal_number = 0;
    ::sigwait(&set, &signal_number);
    if (ending_.load()) return;
    if (signal_number == SIGUSR1) continue;
    if (happened_.exchange(true)) ::_exit(128 + signal_number);
    std::function<void()> callback;
    {
      MutexLock lock(&mu_);
      callback = callback_;
      changed_.SignalAll();
    }
    if (callback) callback();
  }
}

void Interrupt::SetCallback(std::function<void()> callback) {
  bool call = false;
  {
    MutexLock lock(&mu_);
    callback_ = callback;
    call = happened_.load();
  }
  if (call && callback) callback();
}

bool Interrupt::SleepFor(double seconds) {
  const absl::Time deadline = absl::Now() + absl::Seconds(seconds);
  MutexLock lock(&mu_);
  while (!happened_.load()) {
    if (changed_.WaitWithTimeout(&mu_, deadline - absl::Now())) break;
  }
  return !happened_.load();
}

}  // namespace promptcache::cli
