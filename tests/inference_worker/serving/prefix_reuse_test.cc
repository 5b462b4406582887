// Prompts without schema, and conversations, on a real engine.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "common/page_sum.h"
#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/serving/prefix_plan.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tests/inference_worker/serving/served_model.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct TinyModel {
  explicit TinyModel(const TinyLlamaSpec& spec = {},
                     Numerics numerics = Numerics::kExact) {
    const std::string path = dir.path() + "/tiny.gguf";
    WriteTinyLlama(path, spec);
    file = *OpenModelFile(path, {});
    tokenizer = *CreateTokenizer(file->vocabulary());
    backend =
        *CreateCpuBackend(*file, {.num_threads = 2, .numerics = numerics});
  }
  TempDir dir;
  std::unique_ptr<ModelFile> file;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
};

class PrefixReuseTest : public ServedModelTest<TinyModel> {
 protected:
  PrefixReuseTest() { CompileWith("chatml", /*schemas=*/nullptr); }

  GenerationRequest Make(const PromptForm& form, uint32_t max_tokens = 5,
                         MatchMode match = MatchMode::kPrefix) {
    GenerationRequest request =
        ServedModelTest::Make(form, pml::Layout::kCompact, match);
    request.max_tokens = max_tokens;
    return request;
  }
  GenerationRequest Retaining(const PromptForm& form, uint32_t max_tokens = 5) {
    GenerationRequest request = Make(form, max_tokens);
    request.retain = ModulePolicy{.ttl = absl::Seconds(90)};
    return request;
  }
  // A prompt of these very tokens: what an answer's text would be rendered to.
  GenerationRequest MakeTokens(const std::vector<int32_t>& tokens,
                               uint32_t max_tokens = 5) {
    GenerationRequest request = Make(PlainText{"x"}, max_tokens);
    auto prompt = std::make_shared<CompiledPrompt>(*request.prompt);
    pml::Plan plan;
    plan.spans.push_back({.tokens = tokens});
    plan.num_tokens = static_cast<int32_t>(tokens.size());
    plan.next_position = plan.num_tokens;
    plan.exactness = pml::Exactness::kExact;
    EXPECT_TRUE(CutPrefix(&plan));
    prompt->identities = ModuleIdentities(plan, *prompt->identity_base);
    prompt->policies.resize(plan.modules.size());
    prompt->plan = std::make_shared<const pml::Plan>(std::move(plan));
    request.prompt = std::move(prompt);
    return request;
  }
  static std::map<std::string, std::vector<uint64_t>> SumsOf(
      const FakeCache& cache) {
    std::map<std::string, std::vector<uint64_t>> sums;
    for (const CommitModule& m : cache.committed()) sums[m.path] = m.page_sums;
    return sums;
  }
  // Logits, and the bytes of all that is retained.
  void ComparePausedRequests() {
    std::vector<GenerationRequest> requests;
    for (const int words : {6, 9, 12}) {
      requests.push_back(Retaining(PlainText{Words(words)}, 150));
      requests.back().sampling = {.temperature = 1,
                                  .seed = static_cast<uint64_t>(words)};
    }
    std::vector<std::string> alone;
    for (const GenerationRequest& request : requests) {
      alone.push_back(Run(request).logits_sha256);
    }
    FakeCache other(model_->backend->layout());
    const auto other_client = other.NewClient();
    const KvLayout& layout = model_->backend->layout();
    const auto most =
        static_cast<uint64_t>(requests.back().prompt->plan->num_tokens + 150);
    Start({.step_tokens = 50},
          (layout.PagesFor(most) + 4) * ((layout.page_bytes() + 63) / 64 * 64),
          other_client.get());
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (const GenerationRequest& request : requests) {
      sinks.push_back(std::make_shared<RecordingSink>());
      PC_ASSERT_OK(scheduler_->Submit(request, sinks.back()));
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_TRUE(sinks[i]->WaitDone());
      PC_EXPECT_OK(sinks[i]->status());
      EXPECT_EQ(sinks[i]->completed().logits_sha256, alone[i]) << i;
      EXPECT_EQ(sinks[i]->starts(), 1);
    }
    EXPECT_GT(scheduler_->stats().preemptions, 0u);
    EXPECT_EQ(SumsOf(other), SumsOf(cache_));
    Start({});  // before `other` goes
  }
  static std::vector<int32_t> TokensOf(const GenerationRequest& request) {
    std::vector<int32_t> tokens;
    for (const pml::PlanSpan& span : request.prompt->plan->spans) {
      tokens.insert(tokens.end(), span.tokens.begin(), span.tokens.end());
    }
    return tokens;
  }
  static std::string Words(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += "word " + std::to_string(i * 37 % 101) + " of a text, ";
    }
    return text;
  }
};

TEST_F(PrefixReuseTest, NothingStaysUnlessItIsRetained) {
  const auto done = Run(Make(PlainText{Words(30)}));
  EXPECT_EQ(cache_.num_modules(), 0u);
  EXPECT_EQ(done.usage.cached_tokens + done.usage.created_tokens, 0u);
  EXPECT_EQ(done.usage.fresh_tokens, done.usage.prompt_tokens);
  EXPECT_EQ(done.usage.retained_tokens, 0u);
  EXPECT_THAT(last_->started().misses, IsEmpty());
}

TEST_F(PrefixReuseTest, ALongerPromptReadsWhatAShorterOneLeft) {
  const std::string text = Words(30);
  const auto first = Run(Retaining(PlainText{text}));
  const uint32_t n = first.usage.prompt_tokens;
  ASSERT_GT(n, 200u);
  EXPECT_EQ(first.usage.created_tokens, (n - 1) / 64 * 64);
  EXPECT_EQ(first.usage.retained_tokens, (n + 4) / 64 * 64);
  for (const CommitModule& module : cache_.committed()) {
    EXPECT_EQ(module.schema, kPrefixSchema);
    EXPECT_EQ(module.ttl, absl::Seconds(90));
  }
  const GenerationRequest longer = Make(PlainText{text + "and then some more"});
  const auto second = Run(longer);
  EXPECT_EQ(second.usage.cached_tokens, (n - 1) / 64 * 64);
  EXPECT_EQ(second.usage.created_tokens, 0u);
  EXPECT_EQ(longer.prompt->plan->exactness, pml::Exactness::kExact);
  EXPECT_EQ(second.logits_sha256, Run(Bypass(longer)).logits_sha256);
  // Another beginning has nothing of it.
  EXPECT_EQ(Run(Make(PlainText{"Oh, " + text})).usage.cached_tokens, 0u);
  // Nor has a prompt that wants no match.
  const auto unmatched = Run(Make(PlainText{text}, 5, MatchMode::kNone)).usage;
  EXPECT_EQ(unmatched.cached_tokens, 0u);
}

TEST_F(PrefixReuseTest, TheCacheIsToldWhatIsAskedForAndWhatIsOnlyLookedFor) {
  using enum AcquirePurpose;
  const std::string text = Words(30);
  Run(Make(PlainText{text}));
  EXPECT_THAT(cache_.purposes(), ElementsAre(kProbe));
  GenerationRequest reader = Make(PlainText{text});
  reader.cache_mode = CacheMode::kReadOnly;
  Run(std::move(reader));
  EXPECT_THAT(cache_.purposes(), ElementsAre(kProbe, kProbe));
  // The prompt is asked for; what its answer leaves is not.
  Run(Retaining(PlainText{text}, 70));
  EXPECT_THAT(cache_.purposes(), ElementsAre(kProbe, kProbe, kRequest, kKeep));
}

TEST_F(PrefixReuseTest, AnAnswerThatWasRetainedIsReadBitForBit) {
  const GenerationRequest first = Retaining(PlainText{Words(9)}, 200);
  const auto done = Run(first);
  std::vector<int32_t> tokens = TokensOf(first);
  const std::vector<int32_t> answer = last_->tokens();
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  // The last token was sampled and not computed.
  const auto whole = static_cast<uint32_t>((tokens.size() - 1) / 64 * 64);
  EXPECT_EQ(done.usage.retained_tokens, whole);
  ASSERT_GT(whole, done.usage.prompt_tokens + 64);

  tokens.insert(tokens.end(), {5, 6, 7});
  const auto next = Run(MakeTokens(tokens));
  EXPECT_EQ(next.usage.cached_tokens, whole);
  const auto bypassed = Run(Bypass(MakeTokens(tokens)));
  EXPECT_EQ(bypassed.usage.cached_tokens, 0u);
  EXPECT_EQ(next.logits_sha256, bypassed.logits_sha256);
}

TEST_F(PrefixReuseTest, StatesOfAnAnswerAreThoseOfAPrompt) {
  // The same sequence, once generated, once as a prompt: the same bytes.
  const GenerationRequest first = Retaining(PlainText{Words(9)}, 150);
  Run(first);
  std::vector<int32_t> tokens = TokensOf(first);
  const std::vector<int32_t> answer = last_->tokens();
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  auto generated = SumsOf(cache_);
  FakeCache other(model_->backend->layout());
  const auto other_client = other.NewClient();
  Start({.step_tokens = 50}, kTailBytes, other_client.get());
  GenerationRequest again = MakeTokens(tokens);
  again.retain.emplace();
  Run(again);
  size_t compared = 0;
  for (const CommitModule& m : other.committed()) {
    if (!generated.contains(m.path)) continue;
    EXPECT_EQ(m.page_sums, generated[m.path]) << m.path;
    ++compared;
  }
  EXPECT_GE(compared, 4u);
  Start({});  // before `other` goes
}

TEST_F(PrefixReuseTest, AConversationGoesOnWhereItWas) {
  std::vector<pml::ChatMessage> chat = {{"system", Words(12)},
                                        {"user", "First question, and why?"}};
  Run(Retaining(chat, 20));
  chat.push_back({"assistant", "An answer."});
  chat.push_back({"user", Words(8)});
  const GenerationRequest second = Retaining(chat, 20);
  const auto done = Run(second);
  EXPECT_GE(done.usage.cached_tokens, 64u);
  EXPECT_GT(done.usage.created_tokens, 0u);
  EXPECT_EQ(done.logits_sha256, Run(Bypass(second)).logits_sha256);
  const auto repeated = Run(Make(chat, 20));
  EXPECT_EQ(repeated.usage.cached_tokens,
            done.usage.cached_tokens + done.usage.created_tokens);
  EXPECT_EQ(repeated.logits_sha256, done.logits_sha256);
}

TEST_F(PrefixReuseTest, WhatIsThereStaysAsLongAsTheLastWhoRetainsItSays) {
  const std::string text = Words(30);
  Run(Retaining(PlainText{text}, 150));
  EXPECT_THAT(cache_.policy_changes(), IsEmpty());  // commits brought it
  // The same prompt and answer: all of it is there.
  GenerationRequest again = Retaining(PlainText{text}, 150);
  again.retain = ModulePolicy{.ttl = absl::Hours(1), .pin = true};
  const auto done = Run(again);
  const auto changes = cache_.policy_changes();
  EXPECT_EQ(changes.size(), done.usage.retained_tokens / 64);
  std::vector<ModuleKey> keys;
  for (const PolicyChange& change : changes) {
    EXPECT_EQ(change.ttl, absl::Hours(1));
    EXPECT_TRUE(change.pin);
    EXPECT_TRUE(change.only_longer);
    keys.push_back(change.key);
  }
  for (const ModuleIdentity& id : again.prompt->identities) {
    EXPECT_THAT(keys, Contains(id.key));
  }
  // Who only reads changes nothing.
  Run(Make(PlainText{text}));
  EXPECT_EQ(cache_.policy_changes().size(), changes.size());
}

TEST_F(PrefixReuseTest, ARefusedPinOfWhatIsThereIsTold) {
  Run(Retaining(PlainText{Words(30)}));
  cache_.SetRefusePins(true);
  GenerationRequest again = Retaining(PlainText{Words(30)});
  again.retain->pin = true;
  EXPECT_THAT(Run(again).notices, Contains(HasSubstr("pin budget")));
}

TEST_F(PrefixReuseTest, ChunksThatAnotherRequestKeepsAreWaitedFor) {
  const GenerationRequest request = Retaining(PlainText{"Hi"}, 150);
  Run(request);
  std::vector<int32_t> tokens = TokensOf(request);
  const std::vector<int32_t> answer = last_->tokens();
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  const ModuleKey key = MakeTokens(tokens).prompt->identities.at(1).key;
  const uint32_t all = static_cast<uint32_t>((tokens.size() - 1) / 64 * 64);
  cache_.RevokeAll();
  // It lets go of it while we wait.
  cache_.ReserveElsewhere(key, 64);
  auto sink = std::make_shared<RecordingSink>();
  const size_t asked = cache_.purposes().size();
  PC_ASSERT_OK(scheduler_->Submit(request, sink));
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (cache_.purposes().size() == asked && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  cache_.AbandonElsewhere(key);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_EQ(sink->completed().usage.retained_tokens, all);
  EXPECT_THAT(sink->completed().notices, IsEmpty());
  // It does not: that is no want of memory.
  cache_.RevokeAll();
  cache_.ReserveElsewhere(key, 64);
  const auto done = Run(request);
  EXPECT_EQ(done.usage.retained_tokens, 64u);
  EXPECT_THAT(done.notices, ElementsAre(HasSubstr("another request")));
  cache_.AbandonElsewhere(key);
}

TEST_F(PrefixReuseTest, ADaemonThatGoesIsNotToldAsAnotherRequest) {
  const GenerationRequest request = Retaining(PlainText{"Hi"}, 150);
  Run(request);
  std::vector<int32_t> tokens = TokensOf(request);
  const std::vector<int32_t> answer = last_->tokens();
  tokens.insert(tokens.end(), answer.begin(), answer.end());
  cache_.RevokeAll();
  const ModuleKey key = MakeTokens(tokens).prompt->identities.at(1).key;
  cache_.ReserveElsewhere(key, 64);
  const uint64_t commits = cache_.counters().commits;
  auto sink = std::make_shared<RecordingSink>();
  PC_ASSERT_OK(scheduler_->Submit(request, sink));
  // It has kept the first chunk, and waits for the second.
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (cache_.counters().commits == commits && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  cache_.SetDown(true);
  ASSERT_TRUE(sink->WaitDone());
  EXPECT_THAT(
      sink->completed().notices,
      ElementsAre("not all of the answer was kept: the daemon is gone"));
  EXPECT_EQ(sink->completed().usage.retained_tokens, 64u);
  cache_.AbandonElsewhere(key);
}

TEST_F(PrefixReuseTest, ShortPromptsRetainTheirAnswers) {
  const auto done = Run(Retaining(PlainText{"Hi"}, 150));
  EXPECT_EQ(done.usage.created_tokens, 0u);
  EXPECT_EQ(done.usage.retained_tokens,
            (done.usage.prompt_tokens + 149) / 64 * 64);
}

TEST_F(PrefixReuseTest, LessThanAChunkIsToldToBeTooLittle) {
  const auto done = Run(Retaining(PlainText{"Hi"}, 5));
  EXPECT_EQ(done.usage.retained_tokens, 0u);
  EXPECT_THAT(done.notices,
              ElementsAre("nothing retained: fewer than 64 tokens"));
  EXPECT_THAT(Run(Retaining(PlainText{"Hi"}, 70)).notices, IsEmpty());
  GenerationRequest full = Retaining(PlainText{"Hi"}, 70);
  full.full_attention = true;
  EXPECT_THAT(Run(full).notices,
              ElementsAre("nothing retained: full attention leaves nothing"));
}

TEST_F(PrefixReuseTest, WhatCannotBeKeptIsToldAndTheAnswerComes) {
  cache_.SetNoMemory(true);
  auto done = Run(Retaining(PlainText{"Hi"}, 150));
  EXPECT_EQ(done.usage.retained_tokens, 0u);
  EXPECT_THAT(done.notices, Contains(HasSubstr("no memory")));
  cache_.SetNoMemory(false);
  cache_.SetDown(true);
  done = Run(Retaining(PlainText{"Hi"}, 150));
  EXPECT_EQ(done.usage.retained_tokens, 0u);
  EXPECT_THAT(done.notices, Contains(HasSubstr("not kept")));
  cache_.SetDown(false);
  GenerationRequest bypass = Retaining(PlainText{"Hi"}, 150);
  bypass.cache_mode = CacheMode::kBypass;
  EXPECT_EQ(Run(bypass).usage.retained_tokens, 0u);
}

TEST_F(PrefixReuseTest, AnAnswerIsToldInTimeWhetherOrNotItIsKept) {
  const absl::Duration reply_time = absl::Hours(1);
  Start({.reply_time = reply_time});
  Gate gate;
  cache_.SetCommitHook([&] { gate.Wait(); });
  GenerationRequest request = Retaining(PlainText{"Hi"}, 150);
  request.deadline = absl::Now() + reply_time + absl::Milliseconds(1);
  const auto done = Run(request);
  EXPECT_EQ(done.usage.completion_tokens, 150u);
  EXPECT_EQ(done.usage.retained_tokens, 0u);
  EXPECT_THAT(done.notices, ElementsAre(HasSubstr("the deadline")));
  gate.Open();
  ASSERT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_GT(cache_.counters().commits, 0u);  // nevertheless
}

// What lies behind a hole cannot be read.
TEST_F(PrefixReuseTest, AnAnswerWhosePromptWasNotKeptIsNotKeptEither) {
  const auto whole = Run(MakeTokens(std::vector<int32_t>(192, 5), 1));
  for (const uint32_t max_tokens : {1u, 70u}) {
    // Of the prompt's chunks the last is computed as an answer's would be.
    GenerationRequest request =
        MakeTokens(std::vector<int32_t>(192, 5), max_tokens);
    request.retain.emplace();
    int commits = 0;
    cache_.SetCommitHook([&] { cache_.SetLoseReservations(++commits == 1); });
    const auto done = Run(request);
    EXPECT_EQ(done.usage.completion_tokens, max_tokens);
    EXPECT_EQ(done.usage.retained_tokens, 0u);
    EXPECT_THAT(done.notices, Contains(HasSubstr("its prompt is not in")));
    EXPECT_EQ(cache_.num_modules(), 0u);
    if (max_tokens == 1) {
      EXPECT_EQ(done.logits_sha256, whole.logits_sha256);
    }
  }
}

// Nor is it a hole where another request has put meanwhile what this one
// computed for itself.
TEST_F(PrefixReuseTest, AnAnswerBehindAPromptThatAnotherKeptIsKept) {
  GenerationRequest request = MakeTokens(std::vector<int32_t>(192, 5), 70);
  request.retain.emplace();
  request.pending_compute = true;
  const ModuleKey key = request.prompt->identities.at(0).key;
  cache_.ReserveElsewhere(key, 64);
  const auto other = cache_.NewClient();
  int acquires = 0;
  cache_.SetAcquireHook([&] {
    if (++acquires != 2) return;  // the request's own, of its end
    cache_.AbandonElsewhere(key);
    const auto lease =
        other->Acquire({.keys = {{.key = key, .num_tokens = 64}}});
    PC_ASSERT_OK(lease);
    const AcquiredModule& module = (*lease)->modules()[0];
    CommitModule commit{.reservation_id = module.reservation_id};
    for (const std::byte* page : module.read_pages) {
      commit.page_sums.push_back(
          PageSum({page, model_->backend->layout().page_bytes()}));
    }
    PC_ASSERT_OK((*lease)->Commit({commit}, absl::InfiniteFuture()));
  });
  const auto done = Run(request);
  EXPECT_GE(acquires, 3);
  EXPECT_EQ(done.usage.cached_tokens, 0u);
  EXPECT_THAT(done.notices, Not(Contains(HasSubstr("not kept"))));
  EXPECT_EQ(done.usage.retained_tokens, (192u + 69u) / 64 * 64);
}

TEST_F(PrefixReuseTest, FullAttentionIsTheSameUpToRounding) {
  GenerationRequest full = Make(PlainText{Words(30)}, 8);
  Run(full);
  const auto cut = last_->tokens();
  full.full_attention = true;
  Run(full);
  EXPECT_EQ(last_->tokens(), cut);
}

TEST_F(PrefixReuseTest, RealRequestsWaitForATinyPoolAndNoneIsDropped) {
  // Room for one request and a half.
  const GenerationRequest one = Make(PlainText{Words(12)}, 40);
  const KvLayout& layout = model_->backend->layout();
  const auto tokens = static_cast<uint64_t>(one.prompt->plan->num_tokens) + 40;
  const auto alone = Run(Bypass(one));
  Start({.step_tokens = 32}, (layout.PagesFor(tokens) + 1) * 3 / 2 *
                                 ((layout.page_bytes() + 63) / 64 * 64));
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 6; ++i) {
    sinks.push_back(std::make_shared<RecordingSink>());
    PC_ASSERT_OK(scheduler_->Submit(Bypass(one), sinks.back()));
  }
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->WaitDone());
    PC_EXPECT_OK(sink->status());
    EXPECT_EQ(sink->completed().logits_sha256, alone.logits_sha256);
  }
}

// With 8-bit activations, too.
class FastPrefixReuseTest : public PrefixReuseTest {
 protected:
  static void SetUpTestSuite() {
    model_ = new TinyModel(
        {.type = TensorType::kQ8_0, .embedding_type = TensorType::kQ8_0},
        Numerics::kFast);
  }
};

TEST_F(PrefixReuseTest, APausedRequestHasTheStatesOfAnUndisturbedOne) {
  ComparePausedRequests();
}

TEST_F(FastPrefixReuseTest, APausedRequestHasTheStatesOfAnUndisturbedOne) {
  ASSERT_THAT(model_->backend->numerics(), ::testing::StartsWith("fast/"));
  ComparePausedRequests();
}

}  // namespace
}  // namespace promptcache::worker
