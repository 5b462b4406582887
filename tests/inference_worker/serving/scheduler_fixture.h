#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

// What the model says, by the oracle.
inline std::vector<int32_t> ExpectedTokens(const pml::Plan& plan, bool full,
                                           size_t count) {
  std::vector<int32_t> tokens;
  while (tokens.size() < count) {
    const auto logits = HashLogits(OracleState(plan, full, tokens), 64);
    tokens.push_back(static_cast<int32_t>(
        std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  return tokens;
}

class SchedulerTest : public ::testing::Test {
 protected:
  SchedulerTest() : cache_(backend_.layout()) {
    options_.pending_timeout = absl::Seconds(10);
  }
  // Everything has come back, whatever happened.
  void TearDown() override {
    if (scheduler_ != nullptr) {
      EXPECT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
      EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
    }
    scheduler_.reset();
    EXPECT_EQ(cache_.counters().live_leases, 0u);
    EXPECT_EQ(cache_.counters().live_reservations, elsewhere_);
    EXPECT_EQ(cache_.counters().bad_sums, 0u);
    EXPECT_EQ(backend_.faults() > 0, faults_expected_);
  }

  void Start(uint64_t num_pages = 400, bool with_cache = true) {
    pages_ = *PrivatePages::Create(
        backend_.layout(),
        num_pages * std::max<uint64_t>(backend_.layout().page_bytes(), 64));
    client_ = cache_.NewClient();
    scheduler_ = *Scheduler::Create(options_, &backend_, pages_.get(), speaks_,
                                    with_cache ? client_.get() : nullptr);
  }
  std::shared_ptr<RecordingSink> Submit(GenerationRequest request) {
    auto sink = std::make_shared<RecordingSink>();
    auto flag = scheduler_->Submit(std::move(request), sink);
    EXPECT_THAT(flag, IsOk());
    if (flag.ok()) flag_ = *flag;
    return sink;
  }
  std::shared_ptr<RecordingSink> Run(GenerationRequest request) {
    auto sink = Submit(std::move(request));
    EXPECT_TRUE(sink->WaitDone());
    return sink;
  }
  ModuleKey KeyOf(const std::shared_ptr<const pml::Plan>& plan, size_t module) {
    return Compiled(plan)->identities[module].key;
  }

  Scheduler::Options options_;
  HashBackend backend_;
  LetterTokenizer tokenizer_;
  const Tokenizer* speaks_ = &tokenizer_;  // in what Start makes
  FakeCache cache_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<Scheduler> scheduler_;
  std::shared_ptr<CancelFlag> flag_;
  uint64_t elsewhere_ = 0;  // reservations that a test holds
  bool faults_expected_ = false;
};

inline GenerationRequest RequestOf(const std::string& domain,
                                   const std::shared_ptr<const pml::Plan>& plan,
                                   uint32_t max_tokens) {
  GenerationRequest request = Request(plan, max_tokens);
  request.isolation_domain = domain;
  return request;
}

}  // namespace promptcache::worker
