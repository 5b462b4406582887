#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache_daemon/registry/module_log.h"
#include "cache_daemon/registry/sqlite_db.h"
#include "common/unique_fd.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

constexpr char kPrompt[] =
    "<prompt schema=\"lib\"><c/><a/><user>When does it open?</user></prompt>";
constexpr char kBigPrompt[] = "<prompt schema=\"book\"><big/>And then</prompt>";
constexpr char kBothPrompt[] =
    "<prompt schema=\"book\"><thin/><big/>And then</prompt>";
// About 2,900 tokens of the slow model.
constexpr int kBigWords = 420;

class FailureTest : public NodeTest {
 protected:
  // Asks `worker` for a prompt with the big module on another thread and
  // returns once the daemon has reserved memory for it: the worker is encoding
  // now.
  void StartEncoding(WorkerProcess* worker, const char* prompt = kBigPrompt) {
    thread_ = std::thread([this, worker, prompt] {
      answer_ = worker->Generate(Request(prompt, 2), absl::Seconds(60));
    });
    ASSERT_TRUE(Eventually(absl::Seconds(30), [&] {
      const auto stats = Stats();
      return stats.ok() && stats->num_reservations() > 0;
    }));
  }
  void TearDown() override {
    if (thread_.joinable()) thread_.join();
    NodeTest::TearDown();
  }
  Answer answer_;
  std::thread thread_;
};

uint64_t BytesOf(const std::vector<v1::Module>& modules) {
  uint64_t bytes = 0;
  for (const v1::Module& module : modules) bytes += module.bytes();
  return bytes;
}

TEST_F(FailureTest, AWorkerKilledWhileItEncodesLeavesTheAccountsExact) {
  UseSlowModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(
      absl::StrCat("<schema name=\"book\">A shelf. <module name=\"thin\">",
                   Words(20), "</module><module name=\"big\">",
                   Words(kBigWords), "</module></schema>")));
  const Answer thin =
      worker->Generate(Request("<prompt schema=\"book\"><thin/>And</prompt>"));
  PC_ASSERT_OK(thin.status);
  // What stays, whoever is killed; the request that is killed reads it.
  const uint64_t resident = DeviceTier().used_bytes();
  EXPECT_EQ(resident, BytesOf(Modules(false)));
  EXPECT_GE(resident, 2 * PageBytes());
  StartEncoding(worker.get(), kBothPrompt);
  EXPECT_GT(DeviceTier().used_bytes(), resident);
  EXPECT_EQ(DeviceTier().leased_bytes(), resident);
  PC_ASSERT_OK(worker->process().Signal(SIGKILL));
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
    const auto stats = Stats();
    return stats.ok() && stats->num_sessions() == 0 &&
           stats->num_reservations() == 0 && stats->num_leases() == 0 &&
           DeviceTier().used_bytes() == resident;
  })) << Stats()->DebugString();
  const v1::TierStats tier = DeviceTier();
  EXPECT_EQ(tier.used_bytes(), resident);
  EXPECT_EQ(tier.reserved_bytes(), 0u);
  EXPECT_EQ(tier.quarantined_bytes(), 0u);
  EXPECT_EQ(tier.leased_bytes(), 0u);
  EXPECT_EQ(tier.num_modules(), 2u);
  EXPECT_EQ(BytesOf(Modules(false)), resident);
  thread_.join();
  EXPECT_FALSE(answer_.status.ok());
  // The resident ones are still good, and the memory is for another.
  auto next = StartWorker();
  WaitAttached(next.get());
  const Answer answer = next->Generate(Request(kBothPrompt, 2));
  PC_ASSERT_OK(answer.status);
  EXPECT_EQ(answer.usage().cached_tokens(), thin.usage().created_tokens());
  EXPECT_GT(answer.usage().created_tokens(), 1000u);
  EXPECT_EQ(DeviceTier().used_bytes(), BytesOf(Modules(false)));
}

TEST_F(FailureTest, AStoppedWorkersPagesAreNotHandedOut) {
  UseSlowModel();
  StartDaemon();
  auto stopped = StartWorker();
  WaitAttached(stopped.get());
  PC_ASSERT_OK(stopped->PutSchema(BigSchema("book", kBigWords)));
  auto other = StartWorker();
  WaitAttached(other.get());
  StartEncoding(stopped.get());
  PC_ASSERT_OK(stopped->process().Signal(SIGSTOP));
  const uint64_t held = DeviceTier().used_bytes();
  ASSERT_GT(held, 0u);
  // Others fill what is free, and more; each with a preamble of its own.
  for (int i = 0; i < 6; ++i) {
    const std::string name = absl::StrCat("s", i);
    PC_ASSERT_OK(other->PutSchema(BigSchema(name, 200 + i)));
    PC_ASSERT_OK(
        other
            ->Generate(Request(absl::StrCat("<prompt schema=\"", name,
                                            "\"><big/>And then</prompt>"),
                               1))
            .status);
    const v1::TierStats tier = DeviceTier();
    EXPECT_LE(tier.used_bytes(), tier.capacity_bytes());
    EXPECT_GE(tier.reserved_bytes() + tier.quarantined_bytes(), held);
  }
  PC_ASSERT_OK(stopped->process().Signal(SIGKILL));
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
    const v1::TierStats tier = DeviceTier();
    return tier.reserved_bytes() == 0 && tier.quarantined_bytes() == 0;
  }));
}

size_t NumModulesOnDisk(const std::string& registry_path) {
  auto db = daemon::SqliteDb::Open(registry_path);
  if (!db.ok()) return 0;
  auto modules = daemon::ModuleLog::Load(&*db);
  return modules.ok() ? modules->size() : 0;
}

TEST_F(FailureTest, WorkersGoOnWithoutTheDaemonAndAttachAgain) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(SmallSchema("lib")));
  const Answer before = worker->Generate(Request(kPrompt));
  PC_ASSERT_OK(before.status);
  // What the daemon knows goes to disk a moment later, off the request path.
  // Looked at now and then only: a reader that opens the file without pause
  // keeps SQLite's locks busy and the daemon from writing.
  ASSERT_TRUE(Eventually(absl::Seconds(20), [&] {
    absl::SleepFor(absl::Milliseconds(300));
    return NumModulesOnDisk(dir() + "/registry.db") == Modules(false).size();
  }));
  PC_ASSERT_OK(daemon().Signal(SIGKILL));
  ASSERT_TRUE(
      Eventually(absl::Seconds(10), [&] { return !daemon().Running(); }));
  const Answer alone = worker->Generate(Request(kPrompt));
  PC_ASSERT_OK(alone.status);
  EXPECT_EQ(alone.usage().cached_tokens(), 0u);
  EXPECT_EQ(alone.completed.logits_sha256(), before.completed.logits_sha256());
  EXPECT_FALSE(alone.completed.notices().empty());

  StartDaemon();
  WaitAttached(worker.get());
  auto schemas = worker->ListSchemas();
  PC_ASSERT_OK(schemas);
  ASSERT_EQ(schemas->schemas_size(), 1);
  EXPECT_EQ(schemas->schemas(0).name(), "lib");
  const std::vector<v1::Module> known = Modules(/*include_absent=*/true);
  ASSERT_FALSE(known.empty());
  for (const auto& module : known) {
    EXPECT_EQ(module.absence(), v1::MISS_REASON_NOT_RESIDENT);
  }
  const Answer again = worker->Generate(Request(kPrompt));
  PC_ASSERT_OK(again.status);
  EXPECT_EQ(again.usage().created_tokens(), before.usage().created_tokens());
  EXPECT_EQ(again.completed.logits_sha256(), before.completed.logits_sha256());
  for (const auto& span : again.started.spans()) {
    if (span.cached()) {
      EXPECT_EQ(span.miss_reason(), v1::MISS_REASON_NOT_RESIDENT);
    }
  }
  const Answer cached = worker->Generate(Request(kPrompt));
  EXPECT_EQ(cached.usage().cached_tokens(), before.usage().created_tokens());
}

TEST_F(FailureTest, AWorkerStartsWithoutADaemon) {
  UseTinyModel();
  auto worker = StartWorker();
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("Once upon a time");
  request.set_max_tokens(8);
  request.set_ignore_eos(true);
  const Answer answer = worker->Generate(request);
  PC_ASSERT_OK(answer.status);
  EXPECT_EQ(answer.usage().completion_tokens(), 8u);
  EXPECT_THAT(worker->ListSchemas().status(),
              StatusIs(absl::StatusCode::kUnavailable, ::testing::_));
  StartDaemon();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(SmallSchema("lib")));
  PC_ASSERT_OK(worker->Generate(Request(kPrompt)).status);
  EXPECT_GT(worker->Generate(Request(kPrompt)).usage().cached_tokens(), 0u);
}

TEST_F(FailureTest, AWorkerMayBeStartedWithoutACache) {
  UseTinyModel();
  auto worker = StartWorker({"--daemon_socket="});
  v1::GenerateRequest request;
  request.mutable_prompt()->set_text("Once upon a time");
  request.set_max_tokens(8);
  request.set_ignore_eos(true);
  const Answer answer = worker->Generate(request);
  PC_ASSERT_OK(answer.status);
  EXPECT_EQ(answer.usage().completion_tokens(), 8u);
  EXPECT_THAT(worker->PutSchema(SmallSchema("lib")).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       ::testing::HasSubstr("without one")));
}

// The daemon's memory as another process sees it: its first segment.
UniqueFd OpenFirstSegment(pid_t pid) {
  const std::string fds = absl::StrCat("/proc/", pid, "/fd");
  for (const auto& entry : std::filesystem::directory_iterator(fds)) {
    std::error_code error;
    const std::string target =
        std::filesystem::read_symlink(entry.path(), error).string();
    if (!target.starts_with("/memfd:")) continue;
    UniqueFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    struct stat info{};
    if (fd && ::fstat(fd.get(), &info) == 0 && info.st_size >= (1 << 20)) {
      // A segment that holds something.
      std::vector<char> bytes(1 << 20);
      if (::pread(fd.get(), bytes.data(), bytes.size(), 0) > 0 &&
          std::any_of(bytes.begin(), bytes.end(),
                      [](char c) { return c != 0; })) {
        return fd;
      }
    }
  }
  return UniqueFd();
}

// Flips one bit of the first byte that is not zero.
bool FlipABit(int fd) {
  std::vector<char> bytes(1 << 20);
  if (::pread(fd, bytes.data(), bytes.size(), 0) <= 0) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0) continue;
    const char flipped = static_cast<char>(bytes[i] ^ 0x10);
    return ::pwrite(fd, &flipped, 1, static_cast<off_t>(i)) == 1;
  }
  return false;
}

// Paths of the modules that were missing because they are corrupt.
std::vector<std::string> CorruptModules(const Answer& answer) {
  std::vector<std::string> paths;
  for (const v1::Miss& miss : answer.started.misses()) {
    if (miss.reason() == v1::MISS_REASON_CORRUPT) paths.push_back(miss.path());
  }
  return paths;
}

TEST_F(FailureTest, AFlippedBitIsFoundCountedQuarantinedAndRecomputed) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker({"--verify=always"});
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->PutSchema(SmallSchema("lib")));
  const Answer before = worker->Generate(Request(kPrompt));
  PC_ASSERT_OK(before.status);
  const EventLog events(daemon_address());
  const UniqueFd segment = OpenFirstSegment(daemon().pid());
  ASSERT_TRUE(segment) << "no memfd of the daemon holds anything";
  ASSERT_TRUE(FlipABit(segment.get()));
  const Answer after = worker->Generate(Request(kPrompt));
  PC_ASSERT_OK(after.status);
  EXPECT_EQ(after.completed.logits_sha256(), before.completed.logits_sha256());
  EXPECT_LT(after.usage().cached_tokens(), before.usage().created_tokens());
  ASSERT_EQ(CorruptModules(after).size(), 1u);
  ASSERT_TRUE(Eventually(absl::Seconds(10), [&] {
    return !events.Of(v1::CacheEvent::KIND_QUARANTINED).empty();
  }));
  const auto quarantined = events.Of(v1::CacheEvent::KIND_QUARANTINED);
  ASSERT_EQ(quarantined.size(), 1u);
  EXPECT_EQ(quarantined[0].path(), CorruptModules(after)[0]);
  EXPECT_EQ(quarantined[0].evict_reason(), v1::EVICT_REASON_CORRUPT);
  const auto stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_EQ(stats->checksum_mismatches(), 1u);
  for (const auto& eviction : stats->evictions()) {
    EXPECT_EQ(eviction.num_modules(),
              eviction.reason() == v1::EVICT_REASON_CORRUPT ? 1u : 0u);
  }
  // Made anew, which is a miss of that reason, and good again.
  const Answer anew = worker->Generate(Request(kPrompt));
  EXPECT_EQ(CorruptModules(anew), CorruptModules(after));
  const Answer again = worker->Generate(Request(kPrompt));
  EXPECT_EQ(again.usage().cached_tokens(), before.usage().created_tokens());
  EXPECT_EQ(again.completed.logits_sha256(), before.completed.logits_sha256());
}

TEST_F(FailureTest, TheServersEndOnSigterm) {
  UseTinyModel();
  StartDaemon();
  auto worker = StartWorker();
  WaitAttached(worker.get());
  PC_ASSERT_OK(worker->process().Signal(SIGTERM));
  EXPECT_THAT(worker->process().Wait(absl::Seconds(20)),
              IsOkAndHolds("exit status 0"));
  PC_ASSERT_OK(daemon().Signal(SIGTERM));
  EXPECT_THAT(daemon().Wait(absl::Seconds(20)), IsOkAndHolds("exit status 0"));
}

}  // namespace
}  // namespace promptcache::e2e
