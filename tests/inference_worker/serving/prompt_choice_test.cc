#include "inference_worker/serving/prompt_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/page_sum.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/fake_tokenizer.h"

namespace promptcache::worker {
namespace {

using ::testing::Each;

constexpr size_t kChunk = 64;

// A client whose Acquire is not answered in time.
class LateClient final : public CacheClient {
 public:
  bool attached() const override { return true; }
  absl::Status WaitAttached(absl::Time) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<CacheLease>> Acquire(
      const AcquireArgs&) override {
    ++acquires;
    return absl::DeadlineExceededError("no answer");
  }
  void ReportUse(const RequestUse&) override {}
  absl::StatusOr<std::vector<bool>> SetPolicy(
      const std::vector<PolicyChange>&) override {
    return absl::UnimplementedError("");
  }
  int acquires = 0;
};

class PromptChoiceTest : public ::testing::Test, public SchemaSource {
 protected:
  PromptChoiceTest()
      : backend_(4, static_cast<uint32_t>(tokenizer_.vocab_size())),
        cache_(backend_.layout()),
        client_(cache_.NewClient()),
        chooser_(client_.get()) {
    PromptCompiler::Options options;
    options.context_length = 10'000;
    compiler_ = std::make_unique<PromptCompiler>(
        options, &tokenizer_, *ChatTemplate::FromName("chatml"), this);
  }
  ~PromptChoiceTest() override {
    EXPECT_EQ(cache_.counters().live_leases, 0u);
    EXPECT_EQ(cache_.counters().live_reservations, 0u);
  }

  // The registry: one schema, of one module of so many words.
  absl::StatusOr<SchemaRecord> Fetch(const std::string& name) override {
    return SchemaRecord{.name = name,
                        .revision = 1,
                        .text = "<schema name=\"" + name +
                                "\"><module name=\"m\">" + module_ +
                                "</module></schema>"};
  }
  absl::StatusOr<std::vector<std::string>> List(uint32_t) override {
    return std::vector<std::string>{"s"};
  }
  static std::string Words(int count, const std::string& word) {
    std::string text;
    for (int i = 0; i < count; ++i) text += word + std::to_string(i) + " ";
    return text;
  }
  // `before` and the module and something behind it, each so many words.
  std::shared_ptr<const CompiledPrompt> Compile(int before, int module,
                                                int behind) {
    module_ = Words(module, "inside");
    compiler_->InvalidateAll();
    auto prompt = compiler_->Compile(
        PlainText{Words(before, "before") + module_ + Words(behind, "behind")},
        std::nullopt, MatchMode::kAuto);
    PC_EXPECT_OK(prompt);
    EXPECT_EQ((*prompt)->plan->schema, "s");
    return *prompt;
  }
  // As some request would leave them.
  void Put(const CompiledPrompt& prompt, size_t first, size_t count) {
    CacheClient::AcquireArgs args;
    for (size_t i = first; i < first + count; ++i) {
      args.keys.push_back({.key = prompt.identities[i].key,
                           .num_tokens = static_cast<uint32_t>(
                               prompt.plan->modules[i].num_tokens())});
    }
    const auto lease = client_->Acquire(args);
    PC_ASSERT_OK(lease);
    std::vector<CommitModule> commits;
    for (const AcquiredModule& module : (*lease)->modules()) {
      commits.push_back({.reservation_id = module.reservation_id});
      for (const std::byte* page : module.read_pages) {
        commits.back().page_sums.push_back(
            PageSum({page, backend_.layout().page_bytes()}));
      }
    }
    const auto committed = (*lease)->Commit(commits, absl::InfiniteFuture());
    PC_ASSERT_OK(committed);
    EXPECT_THAT(*committed, Each(true));
  }
  bool TakesPrefix(const std::shared_ptr<const CompiledPrompt>& prompt,
                   CacheMode mode = CacheMode::kReadWrite) {
    const auto chosen = chooser_.Choose(prompt, mode, "default");
    EXPECT_TRUE(chosen == prompt || chosen == prompt->as_prefix);
    return chosen == prompt->as_prefix;
  }
  // Chunks that have as many tokens as the modules, at least.
  static size_t Enough(const CompiledPrompt& prompt) {
    return (static_cast<size_t>(prompt.plan->num_cached_tokens) + kChunk - 1) /
           kChunk;
  }

  FakeTokenizer tokenizer_;
  HashBackend backend_;
  FakeCache cache_;
  std::unique_ptr<CacheClient> client_;
  PromptChooser chooser_;
  std::string module_;
  std::unique_ptr<PromptCompiler> compiler_;
};

TEST_F(PromptChoiceTest, AShortModuleGivesWayToALongBeginning) {
  const auto prompt = Compile(200, 6, 1);
  ASSERT_EQ(prompt->plan->exactness, pml::Exactness::kModular);
  ASSERT_GT(prompt->as_prefix->plan->num_cached_tokens,
            10 * prompt->plan->num_cached_tokens);
  EXPECT_FALSE(TakesPrefix(prompt));  // nothing is there
  Put(*prompt, 0, prompt->identities.size());
  EXPECT_FALSE(TakesPrefix(prompt));
  Put(*prompt->as_prefix, 0, prompt->as_prefix->identities.size());
  EXPECT_TRUE(TakesPrefix(prompt));
  EXPECT_EQ(prompt->as_prefix->plan->exactness, pml::Exactness::kExact);
  EXPECT_TRUE(TakesPrefix(prompt, CacheMode::kBypass));
  EXPECT_TRUE(TakesPrefix(prompt, CacheMode::kReadOnly));
}

TEST_F(PromptChoiceTest, OnlyWhatIsThereFromTheBeginningOnCounts) {
  const auto prompt = Compile(1, 100, 100);
  const size_t enough = Enough(*prompt);
  ASSERT_GT(enough, 2u);
  Put(*prompt->as_prefix, 1, enough);
  EXPECT_FALSE(TakesPrefix(prompt));
  Put(*prompt->as_prefix, 0, 1);
  EXPECT_TRUE(TakesPrefix(prompt));
}

// Else a few chunks would keep it out of the cache for good.
TEST_F(PromptChoiceTest, ALongModuleThatIsNotThereYetIsPutThere) {
  const auto prompt = Compile(1, 100, 100);
  Put(*prompt->as_prefix, 0, Enough(*prompt) - 1);
  EXPECT_FALSE(TakesPrefix(prompt));
  EXPECT_FALSE(TakesPrefix(prompt, CacheMode::kBypass));
  // Not by who only reads.
  EXPECT_TRUE(TakesPrefix(prompt, CacheMode::kReadOnly));
  Put(*prompt, 0, prompt->identities.size());
  EXPECT_FALSE(TakesPrefix(prompt, CacheMode::kReadOnly));
}

TEST_F(PromptChoiceTest, NothingIsAskedThatDecidesNothing) {
  // What is left of the prompt has fewer tokens than its module.
  const auto prompt = Compile(0, 100, 0);
  ASSERT_NE(prompt->as_prefix, nullptr);
  EXPECT_FALSE(TakesPrefix(prompt));
  const auto none = *compiler_->Compile(PlainText{Words(90, "other")},
                                        std::nullopt, MatchMode::kAuto);
  EXPECT_EQ(none->as_prefix, nullptr);
  EXPECT_EQ(chooser_.Choose(none, CacheMode::kReadWrite, "default"), none);
  EXPECT_EQ(cache_.counters().acquires, 0u);
  // And the statistics are the request's own.
  TakesPrefix(Compile(100, 20, 1));
  EXPECT_THAT(cache_.purposes(), ::testing::ElementsAre(AcquirePurpose::kKeep));
}

TEST_F(PromptChoiceTest, TheCacheIsAskedInTheRequestsDomain) {
  const auto prompt = Compile(200, 6, 1);
  chooser_.Choose(prompt, CacheMode::kReadWrite, "other");
  EXPECT_THAT(cache_.domains(), ::testing::ElementsAre("other"));
}

TEST_F(PromptChoiceTest, ADaemonThatDoesNotAnswerIsNotAskedAtOnceAgain) {
  const auto prompt = Compile(200, 6, 1);
  cache_.SetDown(true);
  EXPECT_FALSE(TakesPrefix(prompt));
  LateClient late;
  PromptChooser chooser(&late);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(chooser.Choose(prompt, CacheMode::kReadWrite, "default"), prompt);
  }
  EXPECT_EQ(late.acquires, 1);
  EXPECT_EQ(PromptChooser(nullptr).Choose(prompt, CacheMode::kReadWrite, ""),
            prompt);
}

}  // namespace
}  // namespace promptcache::worker
