// The scheduler over an encoder-decoder (tests/data/models/later/tiny-t5): PML
// prompts of every shape, against the oracle, and what must not differ.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>

#include "inference_worker/engine/cpu_backend.h"
#include "tests/inference_worker/serving/served_model.h"
#include "tests/support/oracle_tolerance.h"
#include "tests/support/reference_t5.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;

constexpr char kSchema[] = R"(<schema name="trip">You are a guide.
  <module name="style">Be brief. <param name="tone" length="12" scaffold="calm words"/> Always.</module>
  <module name="city">The city is old.
    <module name="food">People eat soup there.</module>
    It rains.
  </module>
  <module name="plan-a">First we walk to the old bridge.</module>
  <module name="plan-b">Then we sit by the water.</module>
  <module name="today" cache="false">Today is a holiday.</module>
  <scaffold modules="plan-a plan-b"/>
</schema>)";
constexpr char kBareSchema[] =
    R"(<schema name="bare"><module name="plan-b">Then we sit by the water.)"
    R"(</module></schema>)";

constexpr PromptCase kCases[] = {
    {"Preamble", R"(<prompt schema="trip">What now?</prompt>)"},
    {"Argument", R"(<prompt schema="trip"><style tone="kind"/>Go.</prompt>)"},
    {"ScaffoldText", R"(<prompt schema="trip"><style/>Go.</prompt>)"},
    {"Nested", R"(<prompt schema="trip"><city><food/></city>Why?</prompt>)"},
    {"ParentAlone", R"(<prompt schema="trip"><city/>Why?</prompt>)"},
    {"Scaffold", R"(<prompt schema="trip"><plan-a/><plan-b/>And?</prompt>)"},
    {"Reordered", R"(<prompt schema="trip"><plan-b/>So <plan-a/>?</prompt>)"},
    {"Never", R"(<prompt schema="trip"><today/>Open?<city/></prompt>)"},
    {"EndsInAModule", R"(<prompt schema="trip">Again: <plan-b/></prompt>)"},
};

// A tokenizer that ends texts, as T5's does.
class EndingTokenizer final : public Tokenizer {
 public:
  EndingTokenizer(const Tokenizer& tokenizer, int32_t end_id)
      : tokenizer_(tokenizer), end_id_(end_id) {}
  std::vector<int32_t> Encode(std::string_view text) const override {
    return tokenizer_.Encode(text);
  }
  std::string Decode(int32_t id) const override {
    return tokenizer_.Decode(id);
  }
  int32_t ControlToken(std::string_view text) const override {
    return tokenizer_.ControlToken(text);
  }
  int32_t bos_id() const override { return -1; }
  int32_t text_end_id() const override { return end_id_; }
  int32_t vocab_size() const override { return tokenizer_.vocab_size(); }
  const std::vector<int32_t>& stop_ids() const override {
    return tokenizer_.stop_ids();
  }
  const Digest& digest() const override { return tokenizer_.digest(); }

 private:
  const Tokenizer& tokenizer_;
  const int32_t end_id_;
};

class Schemas final : public SchemaSource {
 public:
  absl::StatusOr<SchemaRecord> Fetch(const std::string& name) override {
    return SchemaRecord{.name = name,
                        .revision = 1,
                        .text = name == "trip" ? kSchema : kBareSchema};
  }
};

struct TinyModel {
  TinyModel() {
    file = *OpenModelFile(TestDataPath("models/later/tiny-t5"), {});
    tokenizer = *CreateTokenizer(*file);
    backend = *CreateCpuBackend(*file, {.num_threads = 2});
    oracle = *ReferenceT5::Create(*file);
  }
  std::unique_ptr<ModelFile> file;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<ReferenceT5> oracle;
};

// What the encoder makes of a plan, by the words of segment_plan.h.
class PlanEncoder {
 public:
  PlanEncoder(const ReferenceT5& oracle, const pml::Plan& plan)
      : oracle_(oracle), plan_(plan) {}

  ReferenceT5::Rows Run() {
    for (const pml::PlanSpan& span : plan_.spans) {
      if (span.kind == pml::SpanKind::kFresh) {
        run_.insert(run_.end(), span.tokens.begin(), span.tokens.end());
        continue;
      }
      EndRun();
      AddPiece(plan_.modules[static_cast<size_t>(span.module)], span.piece);
    }
    EndRun();
    return std::move(memory_);
  }

 private:
  void EndRun() {
    if (run_.empty()) return;
    for (auto& row : oracle_.Encode(std::exchange(run_, {}))) {
      memory_.push_back(row);
    }
  }
  void AddPiece(const pml::PlanModule& module, int32_t piece) {
    std::map<int32_t, int32_t> ids;  // by position
    const auto add = [&ids](const pml::Piece& text) {
      for (size_t i = 0; i < text.tokens.size(); ++i) {
        ids[text.offset + static_cast<int32_t>(i)] = text.tokens[i];
      }
    };
    for (const pml::Piece& text : module.pieces) add(text);
    for (const pml::Piece& text : module.placeholders) add(text);
    std::vector<int32_t> positions, tokens;
    for (const auto& [position, id] : ids) {
      positions.push_back(position);
      tokens.push_back(id);
    }
    const ReferenceT5::Rows rows = oracle_.Encode(tokens, positions);
    const pml::Piece& wanted = module.pieces[static_cast<size_t>(piece)];
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t at = positions[i] - wanted.offset;
      if (at >= 0 && at < static_cast<int32_t>(wanted.tokens.size())) {
        memory_.push_back(rows[i]);
      }
    }
  }

  const ReferenceT5& oracle_;
  const pml::Plan& plan_;
  std::vector<int32_t> run_;
  ReferenceT5::Rows memory_;
};

class T5ServingTest : public ServedModelTest<TinyModel> {
 protected:
  T5ServingTest() {
    CompileWith("plain", &schemas_, /*separate_segments=*/true);
  }

  // With all log-probabilities.
  GenerationRequest Make(const PromptForm& form) {
    GenerationRequest request = ServedModelTest::Make(form);
    request.top_logprobs = model_->backend->vocab_size();
    return request;
  }

  // Of the log-probabilities of the first token from what the oracle says.
  double FirstTokenError(const pml::Plan& plan) {
    const int32_t start = model_->file->config().decoder_start_token;
    const ReferenceT5::Rows memory = PlanEncoder(*model_->oracle, plan).Run();
    const auto expected = model_->oracle->Decode(memory, {&start, 1}).at(0);
    double mean = 0, mean_expected = 0;
    const auto count = static_cast<double>(expected.size());
    for (const auto& [id, logprob] : last_->first_top()) {
      mean += logprob / count;
      mean_expected += expected[static_cast<size_t>(id)] / count;
    }
    double error = 0, size = 0;
    for (const auto& [id, logprob] : last_->first_top()) {
      const double centred = expected[static_cast<size_t>(id)] - mean_expected;
      error += std::pow(logprob - mean - centred, 2);
      size += centred * centred;
    }
    return std::sqrt(error / size);
  }

  Schemas schemas_;
};

TEST_F(T5ServingTest, CachedAndBypassedLogitsAreEqualBitForBit) {
  ExpectTheCacheChangesNoBit(kCases);
}

TEST_F(T5ServingTest, AgreesWithTheOracle) {
  for (const PromptCase& c : kCases) {
    const GenerationRequest request = Make(PmlText{c.pml});
    Run(request);
    EXPECT_LT(FirstTokenError(*request.prompt->plan), kOracleTolerance)
        << c.name;
  }
  // Which sees a token that is left out.
  const GenerationRequest request = Make(PmlText{kCases[3].pml});
  Run(request);
  pml::Plan plan = *request.prompt->plan;
  plan.spans.back().tokens.pop_back();
  EXPECT_GT(FirstTokenError(plan), 1.5 * kOracleTolerance);
}

TEST_F(T5ServingTest, ChunksAndCompanyChangeNoBit) {
  ExpectChunksAndCompanyChangeNoBit(kCases);
}

TEST_F(T5ServingTest, OnePlanOfOneSegmentIsExact) {
  for (const PromptCase& c : kCases) {
    EXPECT_EQ(Make(PmlText{c.pml}).prompt->plan->exactness,
              pml::Exactness::kModular)
        << c.name;
  }
  const PromptForm text = PlainText{"Where do we sit by the water?"};
  const PromptForm module =
      PmlText{R"(<prompt schema="bare"><plan-b/></prompt>)"};
  for (const PromptForm& form : {text, module}) {
    const GenerationRequest request = Make(form);
    EXPECT_EQ(request.prompt->plan->exactness, pml::Exactness::kExact);
    GenerationRequest full = request;
    full.full_attention = true;
    EXPECT_EQ(Sha(request), Sha(full));
  }
}

TEST_F(T5ServingTest, AModuleIsTheSameBehindAnyText) {
  Run(Make(PmlText{R"(<prompt schema="trip"><plan-b/>Go.</prompt>)"}));
  EXPECT_EQ(cache_.counters().commits, 2u);  // with the preamble
  const CompletedEvent event =
      Run(Make(PmlText{R"(<prompt schema="bare"><plan-b/>Go.</prompt>)"}));
  EXPECT_EQ(cache_.counters().commits, 2u);
  EXPECT_GT(event.usage.cached_tokens, 0u);
}

TEST_F(T5ServingTest, WarmedModulesAreHits) {
  auto prompts = compiler_->CompileWarm("trip", {}, nullptr);
  PC_ASSERT_OK(prompts);
  for (const auto& prompt : *prompts) Warm(prompt);
  for (const PromptCase& c : kCases) {
    EXPECT_EQ(Run(Make(PmlText{c.pml})).usage.created_tokens, 0u) << c.name;
  }
}

TEST_F(T5ServingTest, LinksAreRefused) {
  GenerationRequest request = Make(PmlText{kCases[0].pml});
  request.link_tokens = 1;
  EXPECT_THAT(
      scheduler_->Submit(request, std::make_shared<RecordingSink>()).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("link_tokens")));
}

TEST_F(T5ServingTest, WhatEndsATextIsPartOfThePrompt) {
  const EndingTokenizer ending(*model_->tokenizer, 2);
  const std::vector<int32_t> ids = ending.Encode("Where do we sit?");
  PromptCompiler::Options options;
  options.context_length = static_cast<int32_t>(ids.size()) + 1;
  options.separate_segments = true;
  const ChatTemplate plain = *ChatTemplate::FromName("plain");
  PromptCompiler compiler(options, &ending, plain, nullptr);
  const auto prompt = compiler.Compile(PlainText{"Where do we sit?"}, {});
  PC_ASSERT_OK(prompt);
  std::vector<int32_t> ended = ids;
  ended.push_back(2);
  EXPECT_EQ((*prompt)->plan->spans.back().tokens, ended);
  EXPECT_EQ((*prompt)->plan->exactness, pml::Exactness::kExact);
  GenerationRequest request = Make(PlainText{"Where do we sit?"});
  request.prompt = *prompt;
  Run(request);
  EXPECT_LT(FirstTokenError(*(*prompt)->plan), kOracleTolerance);
  // There is no room for one more.
  EXPECT_THAT(
      compiler.Compile(PlainText{"Where do we sit??"}, {}).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("context")));
}

TEST_F(T5ServingTest, TheDecoderHasTheContextForItself) {
  Start({.context_length = 12});
  GenerationRequest request = Make(PlainText{"Where do we sit?"});
  request.max_tokens = 100;
  const CompletedEvent event = Run(request);
  EXPECT_EQ(event.finish_reason, FinishReason::kContext);
  EXPECT_EQ(event.usage.completion_tokens, 11u);
}

}  // namespace
}  // namespace promptcache::worker
