#include "inference_worker/engine/cpu_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "inference_worker/engine/private_span.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CpuBackendTest, SaysWhatItIs) {
  const auto backend = TinyBackend({.kernels = "portable", .threads = 3});
  EXPECT_EQ(backend->numerics(), "exact/portable");
  EXPECT_EQ(backend->num_threads(), 3u);
  EXPECT_EQ(backend->vocab_size(), 333u);
  EXPECT_EQ(backend->context_length(), 4096u);
  EXPECT_EQ(backend->layout(), (KvLayout{.num_layers = 3,
                                         .num_kv_heads = 2,
                                         .head_dim = 32,
                                         .page_tokens = 16}));
}

TEST(CpuBackendTest, IsFastWhereTheFileHasQuantisedMatrices) {
  const auto numerics = [](const TinyLlamaSpec& spec, Numerics wanted) {
    return TinyBackend(
               {.spec = spec, .kernels = "portable", .numerics = wanted})
        ->numerics();
  };
  EXPECT_EQ(numerics(QuantizedSpec(), Numerics::kExact), "exact/portable");
  EXPECT_EQ(numerics(QuantizedSpec(), Numerics::kAuto), "fast/portable");
  EXPECT_EQ(numerics(QuantizedSpec(), Numerics::kFast), "fast/portable");
  EXPECT_EQ(numerics(OddSpec(), Numerics::kAuto), "exact/portable");
  // Only some of them.
  TinyLlamaSpec mixed = OddSpec();
  mixed.embedding_type = TensorType::kQ8_0;
  EXPECT_EQ(numerics(mixed, Numerics::kAuto), "fast/portable");
  EXPECT_THAT(CreateCpuBackend(*TinyModelFile(), {.numerics = Numerics::kFast}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"fast\""), HasSubstr("use exact"))));
}

TEST(CpuBackendTest, NumericsHaveThreeNames) {
  EXPECT_THAT(ParseNumerics("auto"), IsOkAndHolds(Numerics::kAuto));
  EXPECT_THAT(ParseNumerics("exact"), IsOkAndHolds(Numerics::kExact));
  EXPECT_THAT(ParseNumerics("fast"), IsOkAndHolds(Numerics::kFast));
  EXPECT_THAT(ParseNumerics("quick"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"quick\""),
                             HasSubstr("auto, exact or fast"))));
}

TEST(CpuBackendTest, ReportsProgressFromNothingToAll) {
  std::vector<double> progress;
  PC_ASSERT_OK(CreateCpuBackend(
      *TinyModelFile(),
      {.progress = [&progress](double done) { progress.push_back(done); }}));
  EXPECT_EQ(progress.front(), 0.0);
  EXPECT_EQ(progress.back(), 1.0);
  EXPECT_GT(progress.size(), 3u);
  EXPECT_TRUE(std::ranges::is_sorted(progress));
}

TEST(CpuBackendTest, RefusesOptionsAndModelsThatItCannotRun) {
  EXPECT_THAT(
      CreateCpuBackend(*TinyModelFile(), {.kernels = "abacus"}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("abacus")));
  EXPECT_THAT(
      CreateCpuBackend(*TinyModelFile(), {.page_tokens = 0}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("page_tokens 0")));
  TinyLlamaSpec spec = OddSpec();
  spec.head_dim = 24;
  EXPECT_THAT(CreateCpuBackend(*TinyModelFile(spec), {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("head_dim 24"), HasSubstr("16"))));
}

TEST(CpuBackendTest, AnEmptyPassIsFine) {
  const auto backend = TinyBackend();
  std::vector<float> logits = {1, 2};
  PC_EXPECT_OK(backend->Forward({}, &logits));
  EXPECT_TRUE(logits.empty());
  const RowGroup no_rows = {.logits = LogitsWanted::kLast};
  PC_EXPECT_OK(backend->Forward({&no_rows, 1}, &logits));
  EXPECT_TRUE(logits.empty());
}

TEST(CpuBackendTest, ARefusedPassWritesNothing) {
  const auto backend = TinyBackend();
  const auto pool = Pool(*backend);
  const std::vector<int32_t> good = RandomIds(20, 1);
  const std::vector<int32_t> bad = {1, 333};
  PrivateSpan a(*pool, 0);
  PrivateSpan b(*pool, 0);
  const RowGroup groups[] = {*a.Append(good, {}, LogitsWanted::kLast),
                             *b.Append(bad, {}, LogitsWanted::kLast)};
  std::vector<float> logits;
  EXPECT_THAT(backend->Forward(groups, &logits),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("row group 1"), HasSubstr("333"))));
  const std::byte* page = groups[0].own.pages[0];
  const auto page_bytes =
      static_cast<std::ptrdiff_t>(backend->layout().page_bytes());
  EXPECT_EQ(std::count(page, page + page_bytes, std::byte{0}), page_bytes);
}

TEST(CpuBackendTest, LogitsAreInTheOrderOfGroups) {
  const auto backend = TinyBackend();
  const auto pool = Pool(*backend);
  const std::vector<int32_t> ids = RandomIds(5, 2);
  std::vector<float> all;
  PrivateSpan first(*pool, 0);
  PC_ASSERT_OK(first.Run(*backend, ids, {}, LogitsWanted::kAll, &all));
  PrivateSpan a(*pool, 0);
  PrivateSpan b(*pool, 0);
  PrivateSpan c(*pool, 0);
  const std::span<const int32_t> s(ids);
  const RowGroup groups[] = {*a.Append(s.first(2), {}, LogitsWanted::kLast),
                             *b.Append(s, {}, LogitsWanted::kNone),
                             *c.Append(s.first(4), {}, LogitsWanted::kAll)};
  std::vector<float> logits;
  PC_ASSERT_OK(backend->Forward(groups, &logits));
  const size_t vocab = backend->vocab_size();
  ASSERT_EQ(logits.size(), 5 * vocab);
  const std::span<const float> expected(all);
  EXPECT_TRUE(
      SameBits(std::span(logits).first(vocab), expected.subspan(vocab, vocab)));
  EXPECT_TRUE(
      SameBits(std::span(logits).subspan(vocab), expected.first(4 * vocab)));
}

// Page tables of their own, as requests that import one module have them.
TEST(CpuBackendTest, ADecodingBatchReadsAModuleOnce) {
  constexpr uint32_t kRequests = 5;
  constexpr uint32_t kModule = 330;
  const auto backend = TinyBackend();
  const auto pool = Pool(*backend);
  std::vector<float> logits;
  PrivateSpan module(*pool, 0);
  PC_ASSERT_OK(module.Run(*backend, RandomIds(kModule, 1), {},
                          LogitsWanted::kNone, &logits));
  const std::vector<int32_t> token = RandomIds(1, 2);
  std::vector<std::vector<const std::byte*>> tables;
  std::vector<KvView> views;
  std::vector<PrivateSpan> tails;
  std::vector<RowGroup> groups;
  views.reserve(kRequests);
  tails.reserve(kRequests);
  uint32_t tail_tokens = 0;
  for (uint32_t i = 0; i < kRequests; ++i) {
    KvView view = module.PlacedAt(static_cast<int32_t>(7 * i));
    tables.emplace_back(view.pages,
                        view.pages + backend->layout().PagesFor(kModule));
    view.pages = tables.back().data();
    views.push_back(view);
    PrivateSpan& tail = tails.emplace_back(*pool, 400);
    PC_ASSERT_OK(tail.Run(*backend, RandomIds(i + 1, 3), {&views[i], 1},
                          LogitsWanted::kNone, &logits));
    // Nobody to share with.
    EXPECT_EQ(backend->attention_reads().needed_tokens, kModule + i + 1);
    EXPECT_EQ(backend->attention_reads().read_tokens, kModule + i + 1);
    groups.push_back(*tail.Append(token, {&views[i], 1}, LogitsWanted::kLast));
    tail_tokens += tail.num_tokens();
  }
  PC_ASSERT_OK(backend->Forward(groups, &logits));
  EXPECT_EQ(backend->attention_reads().needed_tokens,
            kRequests * kModule + tail_tokens);
  EXPECT_EQ(backend->attention_reads().read_tokens, kModule + tail_tokens);
}

TEST(PrivateSpanTest, AFailedPassDoesNotCount) {
  const auto backend = TinyBackend();
  const auto pool = Pool(*backend, 2);
  PrivateSpan span(*pool, 10);
  std::vector<float> logits;
  const std::vector<int32_t> bad = {-1};
  EXPECT_THAT(span.Run(*backend, bad, {}, LogitsWanted::kLast, &logits),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  EXPECT_EQ(span.num_tokens(), 0u);
  EXPECT_THAT(
      span.Run(*backend, RandomIds(33, 1), {}, LogitsWanted::kLast, &logits),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1 of 2")));
  EXPECT_EQ(span.num_tokens(), 0u);
  PC_EXPECT_OK(
      span.Run(*backend, RandomIds(32, 1), {}, LogitsWanted::kLast, &logits));
  EXPECT_EQ(span.next_position(), 42);
  span.Reset();
  EXPECT_EQ(pool->free_pages(), 2u);
}

}  // namespace
}  // namespace promptcache::worker
