// T5: against the oracle in double precision, and what its results
// must not depend on (the engine's README, "What must stay true"), on every
// backend that runs here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "inference_worker/engine/self_check.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/inference_worker/engine/tiny_t5.h"
#include "tests/support/oracle_tolerance.h"
#include "tests/support/reference_t5.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;
using Logits = std::vector<float>;

Ids Tokens(size_t count, uint32_t seed) { return RandomIds(count, seed, 384); }

double Distance(std::span<const float> logits,
                const std::vector<std::vector<double>>& expected) {
  double error = 0;
  double size = 0;
  size_t i = 0;
  for (const auto& row : expected) {
    for (const double x : row) {
      error += (logits[i] - x) * (logits[i] - x);
      size += x * x;
      ++i;
    }
  }
  EXPECT_EQ(i, logits.size());
  return std::sqrt(error / size);
}

class EncoderDecoderTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Backend> Make(const ModelFile& file, uint32_t threads = 2,
                                uint32_t page_tokens = 16) {
    auto backend = MakeTestBackend(
        file,
        {.name = GetParam(), .threads = threads, .page_tokens = page_tokens});
    PC_EXPECT_OK(backend);
    return *std::move(backend);
  }
};

// A module, two texts and a decoder that sees all of them, in passes as told.
enum class Passes { kOne, kEach, kTokenByToken };

Logits RunPlan(Backend& backend, Passes passes, size_t module_tokens = 83) {
  const Ids module_ids = Tokens(module_tokens, 1);
  const Ids texts[] = {Tokens(20, 2), Tokens(1, 3)};
  Ids decoder_ids = Tokens(17, 4);
  decoder_ids.front() = *backend.decoder_start();
  auto pool = Pool(backend, 500);
  PrivateSpan module(*pool, 0);
  PrivateSpan first(*pool, 5);
  PrivateSpan second(*pool, 500);
  PrivateSpan decoder(*pool, 0);
  std::vector<RowGroup> groups;
  Logits logits;
  const auto add = [&](RowGroup group) {
    groups.push_back(group);
    if (passes == Passes::kOne) return;
    PC_EXPECT_OK(backend.Forward(groups, &logits));
    groups.clear();
  };
  const auto encode = [&](const Ids& ids, PrivateSpan& span) {
    RowGroup group = *span.Append(ids, {}, LogitsWanted::kNone);
    group.part = RowPart::kEncoder;
    add(group);
  };
  encode(module_ids, module);
  encode(texts[0], first);
  encode(texts[1], second);
  const KvView seen[] = {first.PlacedAt(0), module.PlacedAt(21),
                         second.PlacedAt(9)};
  if (passes != Passes::kTokenByToken) {
    groups.push_back(*decoder.Append(decoder_ids, seen, LogitsWanted::kAll));
    PC_EXPECT_OK(backend.Forward(groups, &logits));
    return logits;
  }
  Logits all;
  for (const int32_t& id : decoder_ids) {
    PC_EXPECT_OK(
        decoder.Run(backend, {&id, 1}, seen, LogitsWanted::kAll, &logits));
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

// What RunPlan computes, by the oracle.
std::vector<std::vector<double>> Expected(const ModelFile& file,
                                          size_t module_tokens = 83) {
  const auto model = *ReferenceT5::Create(file);
  ReferenceT5::Rows memory;
  for (const Ids& ids :
       {Tokens(20, 2), Tokens(module_tokens, 1), Tokens(1, 3)}) {
    const ReferenceT5::Rows rows = model->Encode(ids);
    memory.insert(memory.end(), rows.begin(), rows.end());
  }
  Ids decoder_ids = Tokens(17, 4);
  decoder_ids.front() = file.config().decoder_start_token;
  return model->Decode(memory, decoder_ids);
}

TEST_P(EncoderDecoderTest, AgreesWithTheOracle) {
  for (const bool gated : {false, true}) {
    const auto file = gated ? TinyGatedT5() : TinyT5();
    const auto backend = Make(*file);
    // Distances beyond the last bucket's beginning, more than a block of rows.
    for (const size_t tokens : {83u, 420u}) {
      EXPECT_LT(Distance(RunPlan(*backend, Passes::kEach, tokens),
                         Expected(*file, tokens)),
                kOracleTolerance)
          << gated << ", " << tokens << " tokens";
    }
  }
}

TEST_P(EncoderDecoderTest, TheOracleSeesASegmentThatIsLeftOut) {
  const auto file = TinyT5();
  const auto backend = Make(*file);
  EXPECT_GT(Distance(RunPlan(*backend, Passes::kEach, 83), Expected(*file, 0)),
            2 * kOracleTolerance);
}

TEST_P(EncoderDecoderTest, OnePassOrOneForEachSegmentOrToken) {
  const auto backend = Make(*TinyT5());
  const Logits expected = RunPlan(*backend, Passes::kOne);
  EXPECT_TRUE(SameBits(RunPlan(*backend, Passes::kEach), expected));
  EXPECT_TRUE(SameBits(RunPlan(*backend, Passes::kTokenByToken), expected));
}

TEST_P(EncoderDecoderTest, AnyNumberOfThreadsAndAnyPageSize) {
  const auto file = TinyT5();
  const Logits expected = RunPlan(*Make(*file, 1, 16), Passes::kOne, 420);
  EXPECT_TRUE(
      SameBits(RunPlan(*Make(*file, 3, 16), Passes::kOne, 420), expected));
  for (const uint32_t page_tokens : TestPageSizes()) {
    EXPECT_TRUE(SameBits(
        RunPlan(*Make(*file, 2, page_tokens), Passes::kOne, 420), expected))
        << page_tokens;
  }
}

// A segment in several groups: their tokens see each other, at the distances
// that their positions say.
TEST_P(EncoderDecoderTest, AGapInASegmentIsADistance) {
  const auto file = TinyT5();
  const auto backend = Make(*file);
  const Ids ids = Tokens(30, 5);
  Ids positions(ids.size());
  for (int32_t i = 0; i < 30; ++i) {
    positions[static_cast<size_t>(i)] = i < 12 ? i : i + 9;
  }
  auto pool = Pool(*backend);
  PrivateSpan first(*pool, 0);
  PrivateSpan second(*pool, 21);
  PrivateSpan decoder(*pool, 0);
  std::vector<RowGroup> groups(3);
  groups[0] = *first.Append(std::span(ids).first(12), {}, LogitsWanted::kNone);
  groups[0].part = RowPart::kEncoder;
  groups[1] = *second.Append(std::span(ids).last(18), {}, LogitsWanted::kNone);
  groups[1].part = RowPart::kEncoderContinued;
  const KvView seen[] = {groups[0].own, groups[1].own};
  const int32_t start = 0;
  groups[2] = *decoder.Append({&start, 1}, seen, LogitsWanted::kAll);
  Logits logits;
  PC_ASSERT_OK(backend->Forward(groups, &logits));
  const auto oracle = *ReferenceT5::Create(*file);
  EXPECT_LT(Distance(logits, oracle->Decode(oracle->Encode(ids, positions),
                                            {&start, 1})),
            kOracleTolerance);
  EXPECT_GT(Distance(logits, oracle->Decode(oracle->Encode(ids), {&start, 1})),
            2 * kOracleTolerance);
}

TEST_P(EncoderDecoderTest, TheSelfCheckFindsNoDifferenceInPlace) {
  const auto backend = Make(*TinyGatedT5());
  const auto pool = Pool(*backend);
  const auto errors = CheckReuse(*backend, *pool, ReuseRule::kAnywhere);
  PC_ASSERT_OK(errors);
  EXPECT_EQ(errors->in_place, 0);
  EXPECT_LT(errors->moved, 1e-4);
  EXPECT_EQ(pool->free_pages(), pool->capacity_pages());
}

// Two models whose encoder and decoder differ in depth, gates, output.
TEST_P(EncoderDecoderTest, AGgufFileGivesTheBitsOfTheFolder) {
  for (const bool gated : {false, true}) {
    const auto folder = gated ? TinyGatedT5() : TinyT5();
    TempDir dir;
    const std::string path = dir.path() + "/t5.gguf";
    GgufOfT5(*folder).Write(path);
    const auto file = OpenModelFile(path, {});
    PC_ASSERT_OK(file);
    EXPECT_TRUE(SameBits(RunPlan(*Make(**file), Passes::kOne, 200),
                         RunPlan(*Make(*folder), Passes::kOne, 200)))
        << gated;
  }
}

// Half of what is read is not what was encoded.
class ForgetfulBackend final : public Backend {
 public:
  explicit ForgetfulBackend(Backend& model) : model_(model) {}

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override {
    std::vector<RowGroup> changed(groups.begin(), groups.end());
    RowGroup& last = changed.back();
    if (groups.size() == 1 && last.part == RowPart::kDecoder) {
      last.visible = last.visible.last(1);
    }
    return model_.Forward(changed, logits);
  }
  const KvLayout& layout() const override { return model_.layout(); }
  uint32_t vocab_size() const override { return model_.vocab_size(); }
  uint32_t context_length() const override { return model_.context_length(); }
  const std::string& numerics() const override { return model_.numerics(); }
  uint32_t num_threads() const override { return model_.num_threads(); }
  std::optional<int32_t> decoder_start() const override {
    return model_.decoder_start();
  }

 private:
  Backend& model_;
};

TEST_P(EncoderDecoderTest, TheSelfCheckFindsASegmentThatIsNotRead) {
  const auto model = Make(*TinyT5());
  ForgetfulBackend backend(*model);
  const auto pool = Pool(backend);
  const auto errors = CheckReuse(backend, *pool, ReuseRule::kAnywhere);
  PC_ASSERT_OK(errors);
  EXPECT_GT(errors->in_place, errors->tolerance);
  EXPECT_GT(errors->moved, errors->tolerance);
  EXPECT_FALSE(errors->ok());
}

INSTANTIATE_TEST_SUITE_P(Kernels, EncoderDecoderTest,
                         ::testing::ValuesIn(TestBackends()),
                         [](const auto& test) { return test.param; });

TEST(GgufOfT5Test, WhatIsNotKnownIsRefused) {
  TempDir dir;
  const std::string path = dir.path() + "/t5.gguf";
  const auto refused = [&path](GgufWriter writer, const char* why) {
    writer.Write(path);
    EXPECT_THAT(OpenModelFile(path, {}).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  const auto model = TinyT5();
  refused(GgufOfT5(*model).SetUint32("t5.attention.causal_span", 3),
          "t5.attention.causal_span: 3");
  refused(GgufOfT5(*model).SetUint32("t5.decoder_start_token_id", 384),
          "t5.decoder_start_token_id: 384 is not one of the 384 tokens");
  refused(GgufOfT5(*model).Remove("t5.attention.relative_buckets_count"),
          "relative_buckets_count");
  refused(GgufOfT5(*model).RemoveTensor("dec.blk.1.cross_attn_k.weight"),
          "\"dec.blk.1.cross_attn_k.weight\" is missing");
  refused(GgufOfT5(*model).SetUint32("t5.decoder_block_count", 1),
          "is not one of a 1-layer t5");
}

TEST(EncoderOutputTest, IsTheEncodersAlone) {
  const auto file = TinyT5();
  const auto backend = *MakeTestBackend(*file, {});
  const Ids ids = Tokens(40, 6);
  std::vector<float> output;
  PC_ASSERT_OK(backend->EncoderOutput(ids, &output));
  const auto expected = (*ReferenceT5::Create(*file))->Encode(ids);
  EXPECT_LT(Distance(output, {expected.back()}), kOracleTolerance);
  EXPECT_THAT(TinyBackend()->EncoderOutput(ids, &output),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("encoder")));
}

}  // namespace
}  // namespace promptcache::worker
