// The scheduler over the real CPU engine: a tiny llama, PML prompts of every
// shape, and what must not differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>

#include "inference_worker/engine/cpu_backend.h"
#include "tests/inference_worker/serving/served_model.h"
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

// A module of more than a tile of attention.
constexpr char kLongSchema[] =
    R"(<schema name="long"><module name="doc">)"
    R"(The museum opens at nine, except on Mondays, when it stays closed. )"
    R"(The ferry leaves from the old harbour every hour until the evening. )"
    R"(The castle has three towers, two of which can be climbed in summer.)"
    R"(</module></schema>)";

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

class ModelServingTest : public ServedModelTest<TinyModel> {
 protected:
  ModelServingTest() { CompileWith("chatml", &schemas_); }

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

  GenerationRequest Make(const std::string& pml,
                         pml::Layout layout = pml::Layout::kCompact) {
    return ServedModelTest::Make(PmlText{pml}, layout);
  }
  // Of the first token's logits.
  std::vector<double> FirstLogits(GenerationRequest request) {
    request.top_logprobs = model_->backend->vocab_size();
    Run(std::move(request));
    std::vector<double> logits(model_->backend->vocab_size());
    for (const auto& [id, logprob] : last_->first_top()) {
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

  OneSchema schemas_{{{"travel", kSchema},
                      {"one", OneDocument("one", "Before. ")},
                      {"two", OneDocument("two", "")},
                      {"chat", kChatSchema},
                      {"long", kLongSchema}}};
};

TEST_F(ModelServingTest, CachedAndBypassedLogitsAreEqualBitForBit) {
  ExpectTheCacheChangesNoBit(kCases);
}

TEST_F(ModelServingTest, ChunksAndCompanyChangeNoBit) {
  ExpectChunksAndCompanyChangeNoBit(kCases);
}

TEST_F(ModelServingTest, AModuleIsReadOnceForAllThatDecodeOverIt) {
  const std::string pml = R"(<prompt schema="long"><doc/>When?</prompt>)";
  GenerationRequest request = Make(pml);
  ASSERT_GE(request.prompt->plan->num_cached_tokens, 64);
  Run(request);
  request.max_tokens = 100;
  std::vector<std::shared_ptr<RecordingSink>> sinks(4);
  for (auto& sink : sinks) {
    sink = std::make_shared<RecordingSink>();
    sink->SetReady(false);  // until all have their first token
    PC_ASSERT_OK(scheduler_->Submit(request, sink));
  }
  for (auto& sink : sinks) ASSERT_TRUE(sink->WaitTokens(1));
  const AttentionReads before = scheduler_->stats().attention;
  for (auto& sink : sinks) sink->SetReady(true);
  scheduler_->Wake();
  for (auto& sink : sinks) ASSERT_TRUE(sink->WaitDone());
  const AttentionReads after = scheduler_->stats().attention;
  EXPECT_GT(after.needed_tokens - before.needed_tokens,
            3 * (after.read_tokens - before.read_tokens) / 2);
  ASSERT_TRUE(scheduler_->Drain(absl::Now() + absl::Seconds(20)));
  EXPECT_EQ(cache_.counters().attention_needed_tokens, after.needed_tokens);
  EXPECT_EQ(cache_.counters().attention_read_tokens, after.read_tokens);
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
    const CompletedEvent event = Run(request);
    EXPECT_EQ(event.logits_sha256, Sha(Bypass(request))) << link;
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
    EXPECT_EQ(Warm(prompt).modules.back(), StateSource::kCreated);
  }
  for (const PromptCase& c : kCases) {
    EXPECT_EQ(Run(Make(c.pml)).usage.created_tokens, 0u) << c.name;
  }
}

}  // namespace
}  // namespace promptcache::worker
