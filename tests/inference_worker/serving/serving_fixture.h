#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/module_key.h"
#include "common/mutex.h"
#include "common/tokenizer.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/fake_cache.h"
#include "tests/inference_worker/serving/hash_backend.h"
#include "tests/inference_worker/serving/plan_builder.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

// Token i is the letter 'a' + i % 26; 0 ends a turn.
class LetterTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (char c : text) ids.push_back(1 + (c - 'a') % 26);
    return ids;
  }
  std::string Decode(int32_t id) const override {
    return id <= 0 ? ""
                   : std::string(1, static_cast<char>('a' + (id - 1) % 26));
  }
  int32_t ControlToken(std::string_view) const override { return -1; }
  int32_t bos_id() const override { return -1; }
  int32_t vocab_size() const override { return 64; }
  const std::vector<int32_t>& stop_ids() const override { return stop_ids_; }
  const Digest& digest() const override { return digest_; }

 private:
  const std::vector<int32_t> stop_ids_ = {0};
  const Digest digest_ = Sha256Of("letters");
};

// Opens once (absl::Notification, which TSan cannot see into).
class Gate {
 public:
  void Open() {
    MutexLock lock(&mu_);
    open_ = true;
    changed_.SignalAll();
  }
  void Wait() {
    MutexLock lock(&mu_);
    while (!open_) changed_.Wait(&mu_);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
};

// Remembers everything; may be told that its reader is slow, or that it reads
// when it is told to.
class RecordingSink final : public GenerationSink {
 public:
  void OnStarted(const StartedEvent& event) override {
    MutexLock lock(&mu_);
    ++starts_;
    started_ = event;
    changed_.SignalAll();
  }
  void OnToken(TokenEvent event) override {
    MutexLock lock(&mu_);
    tokens_.push_back(event.id);
    text_ += event.text;
    events_.push_back(std::move(event));
    changed_.SignalAll();
  }
  void OnDone(const absl::Status& status,
              const CompletedEvent& event) override {
    MutexLock lock(&mu_);
    ++dones_;
    status_ = status;
    completed_ = event;
    changed_.SignalAll();
  }
  bool Ready() override {
    MutexLock lock(&mu_);
    return ready_ && tokens_.size() < read_ + room_;
  }
  bool CaughtUp() override {
    MutexLock lock(&mu_);
    return ready_ && tokens_.size() <= read_ + room_ / 2;
  }

  // Fail after a while, so that a bug does not hang the test.
  bool WaitDone() { return WaitUntil(/*tokens=*/0, /*dones=*/1); }
  bool WaitTokens(size_t count) { return WaitUntil(count, /*dones=*/0); }
  void SetReady(bool ready) {
    MutexLock lock(&mu_);
    ready_ = ready;
  }
  // So many tokens may wait for the reader.
  void SetRoom(size_t tokens) {
    MutexLock lock(&mu_);
    room_ = tokens;
  }
  // The reader takes so many of them.
  void Read(size_t tokens) {
    MutexLock lock(&mu_);
    read_ += std::min(tokens, tokens_.size() - read_);
  }

  absl::Status status() {
    MutexLock lock(&mu_);
    return status_;
  }
  std::vector<int32_t> tokens() {
    MutexLock lock(&mu_);
    return tokens_;
  }
  std::string text() {
    MutexLock lock(&mu_);
    return text_;
  }
  std::vector<TokenEvent> events() {
    MutexLock lock(&mu_);
    return events_;
  }
  std::vector<std::pair<int32_t, float>> first_top() {
    MutexLock lock(&mu_);
    if (events_.empty()) return {};
    return events_.front().top;
  }
  StartedEvent started() {
    MutexLock lock(&mu_);
    return started_;
  }
  CompletedEvent completed() {
    MutexLock lock(&mu_);
    return completed_;
  }
  int starts() {
    MutexLock lock(&mu_);
    return starts_;
  }
  int dones() {
    MutexLock lock(&mu_);
    return dones_;
  }

 private:
  bool WaitUntil(size_t tokens, int dones) ABSL_LOCKS_EXCLUDED(mu_) {
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    MutexLock lock(&mu_);
    while (tokens_.size() < tokens || dones_ < dones) {
      if (absl::Now() >= deadline) return false;
      changed_.WaitWithTimeout(&mu_, absl::Seconds(1));
    }
    return true;
  }

  Mutex mu_;
  CondVar changed_;
  int starts_ ABSL_GUARDED_BY(mu_) = 0;
  int dones_ ABSL_GUARDED_BY(mu_) = 0;
  bool ready_ ABSL_GUARDED_BY(mu_) = true;
  size_t room_ ABSL_GUARDED_BY(mu_) = 1 << 20;
  size_t read_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  StartedEvent started_ ABSL_GUARDED_BY(mu_);
  CompletedEvent completed_ ABSL_GUARDED_BY(mu_);
  std::vector<int32_t> tokens_ ABSL_GUARDED_BY(mu_);
  std::string text_ ABSL_GUARDED_BY(mu_);
  std::vector<TokenEvent> events_ ABSL_GUARDED_BY(mu_);
};

// What a caller sees of an answer, wherever its states came from.
inline void ExpectSameAnswer(const std::shared_ptr<RecordingSink>& sink,
                             const std::shared_ptr<RecordingSink>& alone) {
  PC_EXPECT_OK(sink->status());
  EXPECT_EQ(sink->starts(), 1);
  EXPECT_EQ(sink->tokens(), alone->tokens());
  EXPECT_EQ(sink->text(), alone->text());
  const CompletedEvent got = sink->completed();
  const CompletedEvent want = alone->completed();
  EXPECT_EQ(got.usage.completion_tokens, want.usage.completion_tokens);
  EXPECT_EQ(got.logits_sha256, want.logits_sha256);
  EXPECT_EQ(got.finish_reason, want.finish_reason);
}

// The plan with its keys.
inline std::shared_ptr<const CompiledPrompt> Compiled(
    std::shared_ptr<const pml::Plan> plan) {
  auto prompt = std::make_shared<CompiledPrompt>();
  IdentityBase base;
  base.tokenizer_digest = Sha256Of("letters");
  prompt->identities = ModuleIdentities(*plan, base);
  prompt->policies.resize(plan->modules.size());
  prompt->plan = std::move(plan);
  return prompt;
}

inline GenerationRequest Request(std::shared_ptr<const pml::Plan> plan,
                                 uint32_t max_tokens = 6) {
  GenerationRequest request;
  request.prompt = Compiled(std::move(plan));
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  request.top_logprobs = 1;
  request.arrival = absl::Now();
  return request;
}

}  // namespace promptcache::worker
