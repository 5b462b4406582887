// The servers as an orchestrator runs them: in containers of their own that
// share the socket's folder and nothing else. No pid of another container
// means anything there, and every server is process 1.

#include <gmock/gmock.h>
#include <signal.h>

#include <thread>

#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

class ContainerTest : public NodeTest {
 protected:
  void SetUp() override {
    if (!UseContainers()) GTEST_SKIP() << "no PID namespaces to be had here";
  }
  // The launcher does not pass SIGTERM on.
  void TearDown() override {
    for (const auto& worker : workers_) {
      worker->process().Signal(SIGKILL).IgnoreError();  // may have ended
    }
    daemon().Signal(SIGKILL).IgnoreError();  // skipped: there is none
    NodeTest::TearDown();
  }
  WorkerProcess* AttachedWorker() {
    workers_.push_back(StartWorker());
    WaitAttached(workers_.back().get());
    return workers_.back().get();
  }

 private:
  std::vector<std::unique_ptr<WorkerProcess>> workers_;
};

TEST_F(ContainerTest, WorkersReadWhatAnotherContainerEncoded) {
  UseTinyModel();
  StartDaemon();
  WorkerProcess* const first = AttachedWorker();
  WorkerProcess* const second = AttachedWorker();
  PC_ASSERT_OK(first->PutSchema(SmallSchema("lib")));
  const auto request =
      Request("<prompt schema=\"lib\"><a/><user>When?</user></prompt>");
  const Answer made = first->Generate(request);
  PC_ASSERT_OK(made.status);
  EXPECT_GT(made.usage().created_tokens(), 0u);
  const Answer read = second->Generate(request);
  PC_ASSERT_OK(read.status);
  EXPECT_EQ(read.usage().cached_tokens(), made.usage().created_tokens());
  EXPECT_EQ(read.completed.logits_sha256(), made.completed.logits_sha256());
}

TEST_F(ContainerTest, TheMemoryOfAKilledContainerIsGivenBack) {
  UseSlowModel();
  StartDaemon();
  WorkerProcess* const killed = AttachedWorker();
  WorkerProcess* const other = AttachedWorker();
  PC_ASSERT_OK(killed->PutSchema(BigSchema("book", 300)));
  const auto request =
      Request("<prompt schema=\"book\"><big/>And then</prompt>", 2);
  std::thread asking(
      [&] { EXPECT_FALSE(killed->Generate(request).status.ok()); });
  EXPECT_TRUE(Eventually(absl::Seconds(30), [&] {
    const auto stats = Stats();
    return stats.ok() && stats->num_reservations() > 0;
  }));
  EXPECT_GT(DeviceTier().reserved_bytes(), 0u);
  PC_EXPECT_OK(killed->process().Signal(SIGKILL));
  asking.join();
  EXPECT_TRUE(Eventually(absl::Seconds(30), [&] {
    return DeviceTier().used_bytes() == 0;
  })) << Stats()->DebugString();
  // The other one, process 1 as well, is not taken for it.
  EXPECT_EQ(Stats()->num_sessions(), 1u);
  const Answer answer = other->Generate(request);
  PC_ASSERT_OK(answer.status);
  EXPECT_GT(answer.usage().created_tokens(), 1000u);
}

}  // namespace
}  // namespace promptcache::e2e
