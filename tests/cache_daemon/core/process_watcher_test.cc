#include "cache_daemon/core/process_watcher.h"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace promptcache::daemon {
namespace {

using ::testing::HasSubstr;

UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// A process that waits to be killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      while (true) ::pause();
    }
  }
  ~Child() { KillAndReap(); }
  pid_t pid() const { return pid_; }
  void Kill() const { ::kill(pid_, SIGKILL); }
  void KillAndReap() {
    if (pid_ <= 0) return;
    Kill();
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_;
};

class PidfdWatcherTest : public ::testing::Test {
 protected:
  PidfdWatcherTest() {
    absl::StatusOr<std::unique_ptr<PidfdWatcher>> watcher =
        PidfdWatcher::Create([this](ProcessId id) {
          MutexLock lock(&mu_);
          dead_.push_back(id);
          changed_.SignalAll();
        });
    EXPECT_THAT(watcher, IsOk());
    watcher_ = *std::move(watcher);
  }
  ~PidfdWatcherTest() override { watcher_.reset(); }

  ProcessId Watch(const Child& child) {
    absl::StatusOr<ProcessId> id =
        watcher_->Watch(OpenPidfd(child.pid()), child.pid());
    EXPECT_THAT(id, IsOk());
    return id.ok() ? *id : ProcessId{};
  }
  bool WaitDead(ProcessId id) {
    const absl::Time give_up = absl::Now() + absl::Seconds(5);
    MutexLock lock(&mu_);
    while (std::count(dead_.begin(), dead_.end(), id) == 0) {
      if (absl::Now() > give_up) return false;
      changed_.WaitWithTimeout(&mu_, absl::Seconds(1));
    }
    return true;
  }
  size_t NumDead() {
    MutexLock lock(&mu_);
    return dead_.size();
  }

  Mutex mu_;
  CondVar changed_;
  std::vector<ProcessId> dead_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<PidfdWatcher> watcher_;
};

TEST_F(PidfdWatcherTest, DeathIsToldOnceAlsoBeforeAnybodyReaps) {
  Child child;
  const ProcessId id = Watch(child);
  EXPECT_EQ(watcher_->num_watched(), 1u);
  EXPECT_EQ(NumDead(), 0u);
  child.Kill();
  EXPECT_TRUE(WaitDead(id));
  EXPECT_EQ(watcher_->num_watched(), 0u);
  child.KillAndReap();
  EXPECT_EQ(NumDead(), 1u);
}

TEST_F(PidfdWatcherTest, OneLivingProcessHasOneIdentity) {
  Child a;
  Child b;
  const ProcessId first = Watch(a);
  EXPECT_EQ(Watch(a), first);
  EXPECT_NE(Watch(b), first);
  EXPECT_EQ(watcher_->num_watched(), 2u);
}

TEST_F(PidfdWatcherTest, AStoppedProcessIsNotDead) {
  Child child;
  const ProcessId id = Watch(child);
  ::kill(child.pid(), SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(child.pid(), &status, WUNTRACED), child.pid());
  Child other;  // its death shows that the watcher has looked
  const ProcessId other_id = Watch(other);
  other.Kill();
  EXPECT_TRUE(WaitDead(other_id));
  EXPECT_EQ(watcher_->num_watched(), 1u);
  child.Kill();
  EXPECT_TRUE(WaitDead(id));
}

TEST_F(PidfdWatcherTest, AProcessDeadBeforeWatchIsToldAsWell) {
  Child child;
  UniqueFd pidfd = OpenPidfd(child.pid());
  const pid_t pid = child.pid();
  child.KillAndReap();
  absl::StatusOr<ProcessId> id = watcher_->Watch(std::move(pidfd), pid);
  PC_ASSERT_OK(id);
  EXPECT_TRUE(WaitDead(*id));
}

TEST_F(PidfdWatcherTest, OtherDescriptorsAreRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  UniqueFd write_end(ends[1]);
  EXPECT_THAT(
      watcher_->Watch(UniqueFd(ends[0]), ::getpid()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no pidfd")));
  Child child;
  EXPECT_THAT(
      watcher_->Watch(OpenPidfd(child.pid()), ::getpid()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the peer is")));
  EXPECT_EQ(watcher_->num_watched(), 0u);
}

TEST_F(PidfdWatcherTest, EndsWhileProcessesLive) {
  Child child;
  Watch(child);
  watcher_.reset();
  EXPECT_EQ(NumDead(), 0u);
}

}  // namespace
}  // namespace promptcache::daemon
