// What requests count as hits and misses in the daemon's statistics, exactly.

#include <gmock/gmock.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/e2e/node_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::e2e {
namespace {

// Three modules: the preamble, c and a.
constexpr char kPrompt[] =
    "<prompt schema=\"lib\"><c/><a/><user>When does it open?</user></prompt>";
constexpr uint64_t kModules = 3;
constexpr uint64_t kChunkTokens = 64;

struct Counts {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t missed_probes = 0;
};

class StatisticsTest : public NodeTest {
 protected:
  void SetUp() override {
    UseTinyModel();
    StartDaemon();
  }
  void Attach(const std::vector<std::string>& flags = {}) {
    worker_ = StartWorker(flags);
    WaitAttached(worker_.get());
    PC_ASSERT_OK(worker_->PutSchema(SmallSchema("lib")));
  }
  Answer Ask(const v1::GenerateRequest& request) {
    Answer answer = worker_->Generate(request);
    EXPECT_THAT(answer.status, IsOk());
    return answer;
  }
  static v1::GenerateRequest Plain(const std::string& text) {
    v1::GenerateRequest request = Request("");
    request.mutable_prompt()->set_text(text);
    request.set_ignore_eos(true);
    return request;
  }
  // Of a plain prompt; its last token is never of one.
  static uint64_t ChunksOf(const Answer& answer) {
    return (answer.usage().prompt_tokens() - 1) / kChunkTokens;
  }
  void ExpectLookups(const Counts& want) {
    const auto stats = Stats();
    PC_ASSERT_OK(stats);
    EXPECT_EQ(stats->hit_lookups(), want.hits);
    EXPECT_EQ(stats->miss_lookups(), want.misses);
    EXPECT_EQ(stats->missed_probe_lookups(), want.missed_probes);
    uint64_t with_reason = 0;
    for (const auto& miss : stats->misses()) with_reason += miss.lookups();
    EXPECT_EQ(with_reason, want.misses);
  }
  uint64_t Lookups(v1::MissReason reason) {
    const auto stats = Stats();
    if (!stats.ok()) return 0;
    for (const auto& miss : stats->misses()) {
      if (miss.reason() == reason) return miss.lookups();
    }
    return 0;
  }

  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(StatisticsTest, ASchemasModulesAreMissedOnceAndThenHit) {
  Attach();
  const Answer created = Ask(Request(kPrompt));
  ExpectLookups({.misses = kModules});
  const Answer cached = Ask(Request(kPrompt));
  ExpectLookups({.hits = kModules, .misses = kModules});
  const auto stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_EQ(stats->miss_tokens(), created.usage().created_tokens());
  EXPECT_EQ(stats->hit_tokens(), cached.usage().cached_tokens());
  // The first one's at least.
  EXPECT_GT(stats->attention_read_tokens(), created.usage().prompt_tokens());
  EXPECT_GE(stats->attention_needed_tokens(), stats->attention_read_tokens());
}

TEST_F(StatisticsTest, WarmingCountsNothing) {
  Attach();
  PC_ASSERT_OK(worker_->Warm("lib"));
  ExpectLookups({});
  Ask(Request(kPrompt));
  ExpectLookups({.hits = kModules});
}

TEST_F(StatisticsTest, APlainPromptMissesOnlyWhatItAskedToKeep) {
  Attach();
  const Answer looked = Ask(Plain(Words(60)));
  const uint64_t chunks = ChunksOf(looked);
  ASSERT_GE(chunks, 4u);
  ExpectLookups({.missed_probes = chunks});

  v1::GenerateRequest retaining = Plain(Words(60));
  retaining.set_max_tokens(200);
  retaining.mutable_retain()->mutable_ttl()->set_seconds(600);
  const Answer kept = Ask(retaining);
  // The answer left chunks of its own, which count nowhere.
  ASSERT_GE(kept.usage().retained_tokens(),
            kept.usage().created_tokens() + 2 * kChunkTokens);
  ExpectLookups({.misses = chunks, .missed_probes = chunks});

  const Answer read = Ask(Plain(Words(60)));
  EXPECT_EQ(read.usage().cached_tokens(), chunks * kChunkTokens);
  ExpectLookups({.hits = chunks, .misses = chunks, .missed_probes = chunks});
  const auto stats = Stats();
  PC_ASSERT_OK(stats);
  EXPECT_EQ(stats->hit_tokens(), chunks * kChunkTokens);
  EXPECT_EQ(stats->miss_tokens(), chunks * kChunkTokens);
  EXPECT_EQ(stats->missed_probe_tokens(), chunks * kChunkTokens);
}

TEST_F(StatisticsTest, WhatIsRetainedUntilItExpiresIsMissedAndComputedAnew) {
  Attach();
  v1::GenerateRequest retaining = Plain(Words(60));
  retaining.mutable_retain()->mutable_ttl()->set_nanos(300'000'000);
  const Answer kept = Ask(retaining);
  const uint64_t chunks = ChunksOf(kept);
  ASSERT_GE(kept.usage().retained_tokens(), chunks * kChunkTokens);
  ASSERT_TRUE(Eventually(absl::Seconds(20), [&] {
    return Modules(/*include_absent=*/false).empty();
  }));
  const Answer looked = Ask(Plain(Words(60)));
  ExpectLookups({.misses = chunks, .missed_probes = chunks});
  retaining.mutable_retain()->mutable_ttl()->set_seconds(600);
  const Answer again = Ask(retaining);
  ExpectLookups({.misses = 2 * chunks, .missed_probes = chunks});
  for (const Answer* answer : {&looked, &again}) {
    EXPECT_EQ(answer->usage().cached_tokens(), 0u);
    EXPECT_EQ(answer->ids, kept.ids);
    EXPECT_EQ(answer->completed.logits_sha256(),
              kept.completed.logits_sha256());
  }
  EXPECT_EQ(Lookups(v1::MISS_REASON_EXPIRED), chunks);
  EXPECT_EQ(Lookups(v1::MISS_REASON_NEVER_SEEN), chunks);
  EXPECT_EQ(Ask(Plain(Words(60))).usage().cached_tokens(),
            chunks * kChunkTokens);
}

TEST_F(StatisticsTest, AWorkerThatRetainsUnaskedCountsWhatItMisses) {
  Attach({"--retain_ttl=10m"});
  v1::GenerateRequest request = Plain(Words(60));
  request.set_no_retain(true);
  const uint64_t chunks = ChunksOf(Ask(request));
  ExpectLookups({.missed_probes = chunks});
  request.clear_no_retain();
  EXPECT_GE(Ask(request).usage().retained_tokens(), chunks * kChunkTokens);
  ExpectLookups({.misses = chunks, .missed_probes = chunks});
  EXPECT_EQ(Ask(request).usage().cached_tokens(), chunks * kChunkTokens);
  ExpectLookups({.hits = chunks, .misses = chunks, .missed_probes = chunks});
}

TEST_F(StatisticsTest, APreemptedRequestCountsItsModulesOnce) {
  // Room for the answer of one, and of half another.
  constexpr int kTokens = 1200;
  Attach({absl::StrCat("--tail_bytes=", kTokens / 16 * 3 / 2 * PageBytes())});
  Ask(Request(kPrompt));
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      v1::GenerateRequest request = Request(kPrompt, kTokens);
      request.set_ignore_eos(true);
      Ask(request);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(Eventually(absl::Seconds(10), [&] {
    const auto stats = Stats();
    return stats.ok() && stats->request_preemptions() > 0;
  }));
  ExpectLookups({.hits = 2 * kModules, .misses = kModules});
}

}  // namespace
}  // namespace promptcache::e2e
