#include "cache_daemon/core/process_watcher.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
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

TEST(SameProcessTest, TellsProcessesApartWithoutTheirPids) {
  Child a;
  Child b;
  const UniqueFd first = OpenPidfd(a.pid());
  const UniqueFd again = OpenPidfd(a.pid());
  const UniqueFd other = OpenPidfd(b.pid());
  const std::optional<bool> same = SameProcess(first.get(), again.get());
  if (!same.has_value()) GTEST_SKIP() << "this kernel has no pidfs";
  EXPECT_EQ(same, true);
  EXPECT_EQ(SameProcess(first.get(), other.get()), false);
}

// As the daemon in its container sees a worker in another one: in a PID
// namespace, with a /proc of its own, where the child has no pid.
// 0: as it should be; 77: cannot be tried here.
int WatchFromAnotherNamespace(const UniqueFd& child, const UniqueFd& again,
                              const UniqueFd& other) {
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("proc", "/proc", "proc", 0, nullptr) != 0 ||
      !SameProcess(child.get(), again.get()).has_value()) {
    return 77;
  }
  const auto watcher = PidfdWatcher::Create([](ProcessId) {});
  if (!watcher.ok() || PidOfPidfd(child.get()).ok()) return 1;
  const auto watch = [&](const UniqueFd& pidfd) {
    return (*watcher)->Watch(UniqueFd(::dup(pidfd.get())), /*pid=*/0);
  };
  const absl::StatusOr<ProcessId> first = watch(child);
  if (!first.ok()) return 2;
  if (watch(again) != first) return 3;
  return watch(other) == first ? 4 : 0;
}

TEST(PidfdWatcherContainerTest, AWorkerWithoutAPidHereHasOneIdentityToo) {
  Child child;
  Child other;
  const UniqueFd pidfd = OpenPidfd(child.pid());
  const UniqueFd again = OpenPidfd(child.pid());
  const UniqueFd others = OpenPidfd(other.pid());
  const pid_t outer = ::fork();
  if (outer == 0) {
    if (::unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) ::_exit(77);
    const pid_t inner = ::fork();
    if (inner == 0) {
      ::_exit(WatchFromAnotherNamespace(pidfd, again, others));
    }
    int status = 0;
    ::waitpid(inner, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(outer, &status, 0), outer);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) {
    GTEST_SKIP() << "not root, or a kernel before 6.9";
  }
  EXPECT_EQ(WEXITSTATUS(status), 0);
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
