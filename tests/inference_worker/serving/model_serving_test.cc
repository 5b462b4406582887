// The scheduler over the real CPU engine: a tiny llama, PML prompts of every
// shape, and what must not differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>

#include "inference_worker/engine/cpu_backend.h"
#include "inference_worker/serving/prompt_compiler.h"
#include "inference_worker/serving/scheduler.h"
#include "tests/inference_worker/serving/fake_cache.h"
#include "tests/inference_worker/serving/serving_fixture.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/oracle_tolerance.h"
#include "tests/support/reference_plan.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

constexpr char kSchema[] = R"(<schema name="travel">
  <system>You are a guide.
  <module name="style">Be brief. <param name="tone" length="12" scaffold="calm words"/> Always.</module>
  </system>
  <user>
  <module name="city">The city is old.
    <module name="history">It was founded long ago by a river.</module>
    <module name="food">People eat <param name="dish" length="10" scaffold="soup"/> there.
      <module name="wine">The wine is red.</module>
    </module>
    It rains.
  </module>
  <union>
    <module name="summer">Summer is hot and long in this place.</module>
    <module name="winter">Winter is mild.</module>
  </union>
  <module name="plan-a">First we walk to the old bridge.</module>
  <module name="plan-b">Then we sit by the water.</module>
  <module name="today" cache="false">Today is a holiday.</module>
  Note well.
  <module name="late">A late note.</module>
  </user>
  <scaffold modules="plan-a plan-b"/>
</schema>)";

constexpr char kChatSchema[] =
    R"(<schema name="chat"><system>You are kind.</system>)"
    R"(<user><module name="greeting">Good day. </module></user></schema>)";

struct PromptCase {
  const char* name;
  const char* pml;
};
// Names are the tests'.
constexpr PromptCase kCases[] = {
    {"PreambleOnly",
     R"(<prompt schema="travel"><user>What now?</user></prompt>)"},
    {"Argument",
     R"(<prompt schema="travel"><style tone="kind"/><user>Go.</user></prompt>)"},
    {"ScaffoldText",
     R"(<prompt schema="travel"><style/><user>Go.</user></prompt>)"},
    {"NestedChildren",
     R"(<prompt schema="travel"><user><city><history/><food dish="bread"><wine/></food></city>Why?</user></prompt>)"},
    {"ChildAlone",
     R"(<prompt schema="travel"><user><import module="city/food/wine"/>Why?</user></prompt>)"},
    {"Union",
     R"(<prompt schema="travel"><user><winter/>When?</user></prompt>)"},
    {"CoEncoded",
     R"(<prompt schema="travel"><user><plan-a/><plan-b/>And then?</user></prompt>)"},
    {"Reordered",
     R"(<prompt schema="travel"><user><plan-b/>So <late/><plan-a/>And?</user></prompt>)"},
    {"NeverCached",
     R"(<prompt schema="travel"><user><city/><today/>Open?</user></prompt>)"},
    {"EndsInAModule",
     R"(<prompt schema="travel"><user>Say it again: <late/></user></prompt>)"},
    {"AnswersBefore",
     R"(<prompt schema="travel"><user><city/>Hm?</user><assistant>Yes.</assistant><user><summer/>Sure?</user></prompt>)"},
};

class OneSchema final : public SchemaSource {
 public:
  explicit OneSchema(std::map<std::string, std::string> texts)
      : texts_(std::move(texts)) {}
  absl::StatusOr<SchemaRecord> Fetch(const std::string& name) override {
    const auto it = texts_.find(name);
    if (it == texts_.end()) return absl::NotFoundError("no such schema");
    return SchemaRecord{.name = name, .revision = 1, .text = it->second};
  }

 private:
  const std::map<std::string, std::string> texts_;
};

// Loaded once: packing the weights is most of a test's time.
struct TinyModel {
  TinyModel() {
    const std::string path = dir.path() + "/tiny.gguf";
    WriteTinyLlama(path, {});
    file = *OpenModelFile(path, {});
    tokenizer = *CreateTokenizer(file->vocabulary());
    backend = *CreateCpuBackend(*file, {.num_threads = 2});
    oracle = *ReferenceModel::Create(*file);
  }
  TempDir dir;
  std::unique_ptr<ModelFile> file;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<ReferenceModel> oracle;
};

class ModelServingTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { model_ = new TinyModel(); }
  static void TearDownTestSuite() {
    delete model_;
    model_ = nullptr;
  }

  ModelServingTest()
      : cache_(model_->backend->layout()),
        schemas_({{"travel", kSchema},
                  {"one", OneDocument("one", "Before. ")},
                  {"two", OneDocument("two", "")},
                  {"chat", kChatSchema}}) {
    PromptCompiler::Options options;
    options.identity.tokenizer_digest = model_->tokenizer->digest();
    options.identity.layout = model_->backend->layout();
    options.context_length = 2048;
    compiler_ = std::make_unique<PromptCompiler>(
        options, model_->tokenizer.get(), *ChatTemplate::FromName("chatml"),
        &schemas_);
    pages_ = *PrivatePages::Create(model_->backend->layout(), 16 << 20);
    client_ = cache_.NewClient();
    Start({});
  }
  ~ModelServingTest() override {
    scheduler_->Drain(absl::Now() + absl::Seconds(20));
    EXPECT_EQ(pages_->free_pages(), pages_->capacity_pages());
    scheduler_.reset();
    EXPECT_EQ(cache_.counters().live_leases, 0u);
    EXPECT_EQ(cache_.counters().bad_sums, 0u);
  }

  // The document behind the same preamble, at another place.
  static std::string OneDocument(const std::string& name,
                                 const std::string& before) {
    std::string schema = "<schema name=\"" + name + "\">Shared preamble. ";
    if (!before.empty()) {
      schema += "<module name=\"first\">" + before + "</module>";
    }
    return schema +
           "<module name=\"doc\">The document itself.</module></schema>";
  }

  void Start(const Scheduler::Options& options) {
    scheduler_.reset();
    scheduler_ =
        *Scheduler::Create(options, model_->backend.get(), pages_.get(),
                           model_->tokenizer.get(), client_.get());
  }
  GenerationRequest Make(const std::string& pml,
                         pml::Layout layout = pml::Layout::kCompact) {
    GenerationRequest request;
    auto prompt = compiler_->Compile(PmlText{pml}, layout);
    EXPECT_THAT(prompt, IsOk());
    request.prompt = *prompt;
    request.max_tokens = 5;
    request.ignore_eos = true;
    request.top_logprobs = 20;
    return request;
  }
  CompletedEvent Run(GenerationRequest request) {
    auto sink = std::make_shared<RecordingSink>();
    PC_EXPECT_OK(scheduler_->Submit(std::move(request), sink));
    EXPECT_TRUE(sink->WaitDone());
    PC_EXPECT_OK(sink->status());
    last_top_ = sink->first_top();
    return sink->completed();
  }
  std::string Sha(GenerationRequest request) {
    const CompletedEvent event = Run(std::move(request));
    EXPECT_EQ(event.logits_sha256.size(), 64u);
    return event.logits_sha256;
  }
  // Of the first token's logits.
  std::vector<double> FirstLogits(GenerationRequest request) {
    request.top_logprobs = model_->backend->vocab_size();
    Run(std::move(request));
    std::vector<double> logits(model_->backend->vocab_size());
    for (const auto& [id, logprob] : last_top_) {
      logits[static_cast<size_t>(id)] = logprob;
    }
    return logits;
  }
  static double Distance(std::vector<double> a, std::vector<double> b) {
    Centre(&a);
    Centre(&b);
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      size += a[i] * a[i];
    }
    return std::sqrt(difference / size);
  }
  static void Centre(std::vector<double>* logits) {
    double mean = 0;
    for (double x : *logits) mean += x / static_cast<double>(logits->size());
    for (double& x : *logits) x -= mean;
  }

  static TinyModel* model_;
  FakeCache cache_;
  OneSchema schemas_;
  std::unique_ptr<PromptCompiler> compiler_;
  std::unique_ptr<PrivatePages> pages_;
  std::unique_ptr<CacheClient> client_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::pair<int32_t, float>> last_top_;
};

TinyModel* ModelServingTest::model_ = nullptr;

TEST_F(ModelServingTest, CachedAndBypassedLogitsAreEqualBitForBit) {
  for (const pml::Layout layout :
       {pml::Layout::kCompact, pml::Layout::kSchema}) {
    for (const PromptCase& c : kCases) {
      GenerationRequest bypass = Make(c.pml, layout);
      bypass.cache_mode = CacheMode::kBypass;
      const std::string expected = Sha(bypass);
      // Some modules created, some read from earlier cases; then all read.
      EXPECT_EQ(Sha(Make(c.pml, layout)), expected) << c.name;
      const CompletedEvent cached = Run(Make(c.pml, layout));
      EXPECT_EQ(cached.logits_sha256, expected) << c.name;
      EXPECT_EQ(cached.usage.created_tokens, 0u) << c.name;
      EXPECT_EQ(cached.usage.cached_tokens,
                static_cast<uint32_t>(bypass.prompt->plan->num_cached_tokens))
          << c.name;
    }
  }
}

TEST_F(ModelServingTest, ChunksAndCompanyChangeNoBit) {
  std::vector<std::string> expected;
  for (const PromptCase& c : kCases) expected.push_back(Sha(Make(c.pml)));
  for (uint32_t step_tokens : {17, 40}) {
    cache_.RevokeAll();
    Start({.step_tokens = step_tokens});
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (const PromptCase& c : kCases) {
      sinks.push_back(std::make_shared<RecordingSink>());
      PC_ASSERT_OK(scheduler_->Submit(Make(c.pml), sinks.back()));
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_TRUE(sinks[i]->WaitDone());
      EXPECT_EQ(sinks[i]->completed().logits_sha256, expected[i])
          << kCases[i].name << " in steps of " << step_tokens;
    }
  }
}

TEST_F(ModelServingTest, AgreesWithTheOracle) {
  double worst = 0;
  for (const pml::Layout layout :
       {pml::Layout::kCompact, pml::Layout::kSchema}) {
    for (const PromptCase& c : kCases) {
      GenerationRequest request = Make(c.pml, layout);
      const auto logits =
          RunReferencePlan(*model_->oracle, *request.prompt->plan);
      const double distance = Distance(logits.back(), FirstLogits(request));
      EXPECT_LT(distance, kOracleTolerance) << c.name;
      worst = std::max(worst, distance);
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST_F(ModelServingTest, TheOracleSeesAModuleOnePlaceOff) {
  GenerationRequest request = Make(kCases[3].pml);
  pml::Plan moved = *request.prompt->plan;
  moved.spans[1].start += 1;
  const auto logits = RunReferencePlan(*model_->oracle, moved);
  EXPECT_GT(Distance(logits.back(), FirstLogits(request)),
            1.5 * kOracleTolerance);
}

TEST_F(ModelServingTest, ExactPlansAgreeWithFullAttention) {
  for (const char* pml :
       {R"(<prompt schema="two"><doc/>Why?</prompt>)",
        R"(<prompt schema="one"><first/>Why?</prompt>)",
        R"(<prompt schema="chat"><user><greeting/>Who?</user></prompt>)"}) {
    GenerationRequest request = Make(pml);
    ASSERT_EQ(request.prompt->plan->exactness, pml::Exactness::kExact) << pml;
    GenerationRequest full = request;
    full.full_attention = true;
    EXPECT_LT(Distance(FirstLogits(request), FirstLogits(full)),
              kOracleTolerance);
  }
}

TEST_F(ModelServingTest, LinkedTokensAreTheSameWithAndWithoutTheCache) {
  for (uint32_t link : {1, 4, 1000}) {
    GenerationRequest request = Make(kCases[7].pml);
    request.link_tokens = link;
    GenerationRequest bypass = request;
    bypass.cache_mode = CacheMode::kBypass;
    const CompletedEvent event = Run(request);
    EXPECT_EQ(event.logits_sha256, Sha(bypass)) << link;
    EXPECT_EQ(event.usage.prompt_tokens, event.usage.cached_tokens +
                                             event.usage.created_tokens +
                                             event.usage.fresh_tokens);
  }
}

TEST_F(ModelServingTest, AModuleOfTwoSchemasIsEncodedOnce) {
  Run(Make(R"(<prompt schema="one"><first/><doc/>Why?</prompt>)"));
  EXPECT_EQ(cache_.counters().commits, 3u);
  const CompletedEvent event =
      Run(Make(R"(<prompt schema="two"><doc/>Why?</prompt>)"));
  EXPECT_EQ(cache_.counters().commits, 3u);
  EXPECT_EQ(event.usage.created_tokens, 0u);
  EXPECT_GT(event.usage.cached_tokens, 0u);
}

TEST_F(ModelServingTest, WarmedModulesAreHits) {
  auto prompts = compiler_->CompileWarm("travel", {}, nullptr);
  PC_ASSERT_OK(prompts);
  for (const auto& prompt : *prompts) {
    GenerationRequest request;
    request.prompt = prompt;
    request.max_tokens = 1;
    request.warm = true;
    EXPECT_EQ(Run(std::move(request)).modules.back(), StateSource::kCreated);
  }
  for (const PromptCase& c : kCases) {
    EXPECT_EQ(Run(Make(c.pml)).usage.created_tokens, 0u) << c.name;
  }
}

}  // namespace
}  // namespace promptcache::worker
