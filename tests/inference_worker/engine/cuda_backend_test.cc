#include "inference_worker/engine/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "inference_worker/engine/private_span.h"
#include "inference_worker/engine/sampler.h"
#include "tests/inference_worker/engine/test_gpu.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/inference_worker/engine/tiny_t5.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Ids = std::span<const int32_t>;
using Logits = std::vector<float>;

double RelativeDifference(const Logits& a, const Logits& b) {
  EXPECT_EQ(a.size(), b.size());
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(error / size);
}

std::unique_ptr<Backend> TinyCudaBackend(const TinyLlamaSpec& spec,
                                         CudaBackendOptions options) {
  options.device = TestGpu();
  auto backend = CreateCudaBackend(*TinyModelFile(spec), options);
  PC_EXPECT_OK(backend);
  return *std::move(backend);
}

class CudaBackendTest : public ::testing::Test {
 protected:
  static std::unique_ptr<Backend> Make(bool invariant = false,
                                       bool graphs = true) {
    return TinyCudaBackend(
        HeadSpec(),
        {.batch_invariant = invariant, .invariant_rows = 16, .graphs = graphs});
  }
  // Heads of a size that GPUs have, too.
  static TinyLlamaSpec HeadSpec() {
    TinyLlamaSpec spec = OddSpec();
    spec.layers = 2;
    spec.heads = 3;
    spec.kv_heads = 1;
    spec.head_dim = 64;
    return spec;
  }
  // All logits of `ids` in passes of `chunks` rows (the last one repeats).
  static Logits RunChunked(Backend& backend, PrivateSpan& span, Ids ids,
                           const std::vector<size_t>& chunks) {
    Logits all;
    Logits logits;
    for (size_t first = 0, i = 0; first < ids.size(); ++i) {
      const size_t count =
          std::min(chunks[std::min(i, chunks.size() - 1)], ids.size() - first);
      PC_EXPECT_OK(span.Run(backend, ids.subspan(first, count), {},
                            LogitsWanted::kAll, &logits));
      all.insert(all.end(), logits.begin(), logits.end());
      first += count;
    }
    return all;
  }
  static Logits RunAlone(Backend& backend, Ids ids,
                         const std::vector<size_t>& chunks = {100000}) {
    auto pool = Pool(backend);
    PrivateSpan span(*pool, 0);
    return RunChunked(backend, span, ids, chunks);
  }
};

TEST_F(CudaBackendTest, SaysWhatItIs) {
  const auto backend = Make();
  EXPECT_THAT(backend->numerics(),
              ::testing::MatchesRegex("exact/cuda-sm[0-9]+"));
  EXPECT_EQ(Make(/*invariant=*/true)->numerics(),
            backend->numerics() + "-invariant");
  EXPECT_EQ(backend->vocab_size(), 333u);
  EXPECT_EQ(backend->layout().head_dim, 64u);
}

TEST_F(CudaBackendTest, RefusesWhatItCannotRun) {
  const auto refusal = [](const TinyLlamaSpec& spec,
                          CudaBackendOptions options) {
    options.device = TestGpu();
    return CreateCudaBackend(*TinyModelFile(spec), options).status();
  };
  TinyLlamaSpec spec = HeadSpec();
  spec.head_dim = 48;
  EXPECT_THAT(refusal(spec, {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("head_dim 48"), HasSubstr("128"))));
  EXPECT_THAT(
      refusal(HeadSpec(), {.page_tokens = 5}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("powers of two")));
  EXPECT_THAT(
      refusal(HeadSpec(), {.numerics = Numerics::kFast}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("use exact")));
}

TEST_F(CudaBackendTest, ARefusedPassSaysWhy) {
  const auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> bad = {1, 333};
  PrivateSpan span(*pool, 0);
  Logits logits;
  EXPECT_THAT(span.Run(*backend, bad, {}, LogitsWanted::kLast, &logits),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("333")));
  PC_EXPECT_OK(backend->Forward({}, &logits));
  EXPECT_TRUE(logits.empty());
}

// A pass of a shape is run, then recorded, then replayed; what it reads moves
// on from page to page.
TEST_F(CudaBackendTest, RecordedDecodingGivesTheSameBits) {
  const std::vector<int32_t> ids = RandomIds(75, 3);
  const std::vector<size_t> chunks = {40, 1};
  EXPECT_TRUE(SameBits(RunAlone(*Make(false, /*graphs=*/true), ids, chunks),
                       RunAlone(*Make(false, /*graphs=*/false), ids, chunks)));
}

// A longer pass between two of the same shape takes larger buffers: what was
// recorded before has addresses that are no longer there.
TEST_F(CudaBackendTest, RecordedPassesAreForgottenWhenMemoryMoves) {
  const auto backend = Make(/*invariant=*/true);
  const std::vector<int32_t> ids = RandomIds(6, 1);
  const Logits before = RunAlone(*backend, ids, {1});
  EXPECT_TRUE(SameBits(RunAlone(*backend, ids, {1}), before));  // recorded
  RunAlone(*backend, RandomIds(600, 2));
  EXPECT_TRUE(SameBits(RunAlone(*backend, ids, {1}), before));
}

// T5's decoder: steps of three requests, some wanting tokens, some logits, that
// see a segment of their own once or many times. One step first that takes all
// the memory, so that what is recorded afterwards stays.
TEST_F(CudaBackendTest, RecordedDecodingOfT5GivesTheSameBits) {
  const auto file = TinyT5();
  const auto make = [&](bool graphs) {
    auto backend = CreateCudaBackend(*file, {.device = TestGpu(),
                                             .batch_invariant = true,
                                             .invariant_rows = 16,
                                             .graphs = graphs,
                                             .page_tokens = 8});
    PC_EXPECT_OK(backend);
    return *std::move(backend);
  };
  const auto recorded = make(true);
  const auto direct = make(false);
  const auto pool = Pool(*recorded, 600);
  uint32_t round = 0;
  for (const size_t num_views : {40, 1, 9, 40}) {
    const int num_steps = round == 0 ? 1 : 4;
    ++round;
    std::vector<PrivateSpan> segments, a, b;
    std::vector<KvView> seen;
    for (uint32_t i = 0; i < 3; ++i) {
      PrivateSpan& segment = segments.emplace_back(*pool, 0);
      const auto ids = RandomIds(5 + 40 * i, round + i, 384);
      PC_ASSERT_OK(EncodeSegment(*direct, ids, segment));
      a.emplace_back(*pool, 0);
      b.emplace_back(*pool, 0);
    }
    for (const PrivateSpan& segment : segments) {
      seen.insert(seen.end(), num_views, segment.PlacedAt(0));
    }
    for (int step = 0; step < num_steps; ++step) {
      const std::vector<int32_t> ids = RandomIds(3, round, 384);
      std::vector<RowGroup> groups_a, groups_b;
      TokenChoice choice_a, choice_b;
      for (size_t i = 0; i < 3; ++i) {
        const Ids id = Ids(ids).subspan(i, 1);
        const auto view = std::span(seen).subspan(i * num_views, num_views);
        groups_a.push_back(*a[i].Append(id, view, LogitsWanted::kLast));
        groups_b.push_back(*b[i].Append(id, view, LogitsWanted::kLast));
      }
      groups_a[1].choice = &choice_a;
      groups_b[1].choice = &choice_b;
      Logits got, want;
      PC_ASSERT_OK(recorded->Forward(groups_a, &got));
      PC_ASSERT_OK(direct->Forward(groups_b, &want));
      EXPECT_EQ(got.size(), 2u * recorded->vocab_size());
      EXPECT_TRUE(SameBits(got, want)) << round << ", step " << step;
      EXPECT_EQ(choice_a.token, choice_b.token);
      EXPECT_GE(choice_a.token, 0);
    }
  }
}

// The graph of one batch must not serve another one's rows.
TEST_F(CudaBackendTest, RecordedBatchesFollowTheirRows) {
  const auto recorded = Make(false, true);
  const auto direct = Make(false, false);
  auto pool = Pool(*recorded);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::vector<int32_t>> texts;
    std::vector<PrivateSpan> a, b;
    std::vector<RowGroup> groups_a, groups_b;
    a.reserve(3);
    b.reserve(3);
    Logits ignored, got, want;
    for (uint32_t i = 0; i < 3; ++i) {
      texts.push_back(RandomIds(6 + i, 10 * static_cast<uint32_t>(round) + i));
    }
    for (const auto& text : texts) {
      const Ids ids(text);
      for (auto* spans : {&a, &b}) {
        PrivateSpan& span = spans->emplace_back(*pool, 0);
        PC_ASSERT_OK(span.Run(*direct, ids.first(ids.size() - 1), {},
                              LogitsWanted::kNone, &ignored));
        (spans == &a ? groups_a : groups_b)
            .push_back(*span.Append(ids.last(1), {}, LogitsWanted::kLast));
      }
    }
    PC_ASSERT_OK(recorded->Forward(groups_a, &got));
    PC_ASSERT_OK(direct->Forward(groups_b, &want));
    EXPECT_TRUE(SameBits(got, want)) << round;
  }
}

// Steps of a batch in which some want logits and some the token alone: the
// CPU's sampler, from the logits of the same pass, says which.
TEST_F(CudaBackendTest, ChosenTokensAreTheSamplers) {
  const auto backend = Make(/*invariant=*/true);
  auto pool = Pool(*backend);
  const SamplingOptions options[] = {
      {},  // greedy
      {.temperature = 1, .top_k = 40, .top_p = 0.9f, .seed = 3},
      {.temperature = 2, .min_p = 0.02f, .repetition_penalty = 1.5f}};
  std::vector<std::vector<int32_t>> texts;
  std::vector<PrivateSpan> chosen, returned;
  std::vector<Sampler> samplers;
  for (uint32_t i = 0; i < 3; ++i) {
    texts.push_back(RandomIds(5 + i, i));
    chosen.emplace_back(*pool, 0);
    returned.emplace_back(*pool, 0);
    samplers.emplace_back(options[i]);
  }
  // Shapes repeat from the second step on.
  for (int step = 0; step < 6; ++step) {
    std::vector<RowGroup> groups;
    std::vector<TokenChoice> choices(3);
    for (size_t i = 0; i < 3; ++i) {
      const Ids rows = step == 0 ? Ids(texts[i]) : Ids(texts[i]).last(1);
      choices[i] = samplers[i].NextChoice(texts[i]);
      for (auto* spans : {&returned, &chosen}) {
        groups.push_back(*(*spans)[i].Append(rows, {}, LogitsWanted::kLast));
      }
      groups.back().choice = &choices[i];
    }
    Logits logits;
    PC_ASSERT_OK(backend->Forward(groups, &logits));
    ASSERT_EQ(logits.size(), 3u * backend->vocab_size());
    for (size_t i = 0; i < 3; ++i) {
      const std::span<const float> row = std::span(logits).subspan(
          i * backend->vocab_size(), backend->vocab_size());
      EXPECT_EQ(choices[i].token, samplers[i].Choose(row, choices[i]))
          << "step " << step << ", request " << i;
      samplers[i].CountStep();
      texts[i].push_back(choices[i].token);
    }
  }
}

// More than a block of them, after rows whose logits come back.
TEST_F(CudaBackendTest, ManyTokensAreChosenInBlocks) {
  TinyLlamaSpec spec = HeadSpec();
  spec.layers = 1;
  const auto backend =
      TinyCudaBackend(spec, {.batch_invariant = true, .invariant_rows = 16});
  constexpr size_t kGroups = 280;
  auto pool = Pool(*backend, kGroups);
  const std::vector<int32_t> ids = RandomIds(kGroups, 4);
  std::vector<PrivateSpan> spans;
  std::vector<RowGroup> groups;
  std::vector<TokenChoice> choices(kGroups);
  spans.reserve(kGroups);
  for (size_t i = 0; i < kGroups; ++i) {
    PrivateSpan& span = spans.emplace_back(*pool, 0);
    groups.push_back(
        *span.Append(Ids(ids).subspan(i, 1), {}, LogitsWanted::kLast));
    if (i % 7 != 0) groups.back().choice = &choices[i];
  }
  Logits some, all;
  PC_ASSERT_OK(backend->Forward(groups, &some));
  for (RowGroup& group : groups) group.choice = nullptr;
  PC_ASSERT_OK(backend->Forward(groups, &all));
  const size_t vocab = backend->vocab_size();
  for (size_t i = 0; i < kGroups; ++i) {
    const Logits row(all.begin() + static_cast<ptrdiff_t>(i * vocab),
                     all.begin() + static_cast<ptrdiff_t>((i + 1) * vocab));
    if (i % 7 != 0) {
      EXPECT_EQ(choices[i].token, Argmax(row)) << i;
    } else {
      EXPECT_EQ(Argmax(std::span(some).subspan(i / 7 * vocab, vocab)),
                Argmax(row));
    }
  }
}

TEST_F(CudaBackendTest, InvariantRowsDoNotDependOnChunksOrBatch) {
  const auto backend = Make(/*invariant=*/true);
  const std::vector<int32_t> ids = RandomIds(90, 1);
  const Logits whole = RunAlone(*backend, ids);
  for (const auto& chunks : {std::vector<size_t>{1, 7, 64, 3}, {33}, {60, 1}}) {
    EXPECT_TRUE(SameBits(RunAlone(*backend, ids, chunks), whole));
  }
  auto pool = Pool(*backend);
  const std::vector<int32_t> other = RandomIds(21, 2);
  PrivateSpan a(*pool, 0);
  PrivateSpan b(*pool, 0);
  const RowGroup groups[] = {*a.Append(other, {}, LogitsWanted::kNone),
                             *b.Append(ids, {}, LogitsWanted::kAll)};
  Logits among;
  PC_ASSERT_OK(backend->Forward(groups, &among));
  EXPECT_TRUE(SameBits(among, whole));
}

TEST_F(CudaBackendTest, CachedOrComputedInThePassIsTheSameWhenInvariant) {
  const auto backend = Make(/*invariant=*/true);
  auto pool = Pool(*backend);
  const std::vector<int32_t> module_ids = RandomIds(50, 5);
  const std::vector<int32_t> fresh_ids = RandomIds(9, 6);
  Logits apart, together, ignored;
  PrivateSpan module(*pool, 0);
  PrivateSpan fresh(*pool, 300);
  PC_ASSERT_OK(
      module.Run(*backend, module_ids, {}, LogitsWanted::kNone, &ignored));
  const KvView seen = module.PlacedAt(200);
  PC_ASSERT_OK(
      fresh.Run(*backend, fresh_ids, {&seen, 1}, LogitsWanted::kAll, &apart));
  PrivateSpan module2(*pool, 0);
  PrivateSpan fresh2(*pool, 300);
  std::vector<RowGroup> groups = {
      *module2.Append(module_ids, {}, LogitsWanted::kNone)};
  KvView also_seen = groups[0].own;
  also_seen.position_offset = 200;
  groups.push_back(
      *fresh2.Append(fresh_ids, {&also_seen, 1}, LogitsWanted::kAll));
  PC_ASSERT_OK(backend->Forward(groups, &together));
  EXPECT_TRUE(SameBits(apart, together));
}

// Without the option only the last bits may differ.
TEST_F(CudaBackendTest, OtherModesDifferByRoundingAlone) {
  const std::vector<int32_t> ids = RandomIds(60, 8);
  const Logits invariant = RunAlone(*Make(true), ids);
  EXPECT_LT(RelativeDifference(RunAlone(*Make(false), ids, {25, 1}), invariant),
            0.01);
  EXPECT_LT(RelativeDifference(
                RunAlone(*TinyCudaBackend(HeadSpec(), {.rotate_keys = true}),
                         ids, {25, 1}),
                invariant),
            0.01);
}

// Brings each layer when it is waited for, and never before.
class LateArrival final : public Arrival {
 public:
  LateArrival(const KvLayout& layout, std::vector<const std::byte*> from,
              std::vector<std::byte*> to)
      : layout_(layout),
        from_(std::move(from)),
        to_(std::move(to)),
        stream_(*TestGpu()->NewStream()) {
    // All bits set: NaN.
    const std::vector<uint8_t> poison(layout.page_bytes(), 0xFF);
    for (std::byte* page : to_) {
      PC_EXPECT_OK(stream_->Copy(page, poison.data(), poison.size(),
                                 gpu::CopyKind::kToDevice));
      PC_EXPECT_OK(stream_->Synchronize());
    }
  }
  uint32_t num_layers() const { return num_layers_; }

 private:
  bool WaitForLayers(uint32_t num_layers) override {
    const size_t layer_bytes = layout_.page_bytes() / layout_.num_layers;
    for (size_t i = 0; i < to_.size(); ++i) {
      PC_EXPECT_OK(stream_->Copy(to_[i] + num_layers_ * layer_bytes,
                                 from_[i] + num_layers_ * layer_bytes,
                                 (num_layers - num_layers_) * layer_bytes,
                                 gpu::CopyKind::kOnDevice));
    }
    PC_EXPECT_OK(stream_->Synchronize());
    EXPECT_EQ(num_layers, num_layers_ + 1);  // layer by layer
    num_layers_ = num_layers;
    return true;
  }
  bool WaitForVerified() override { return true; }

  const KvLayout layout_;
  const std::vector<const std::byte*> from_;
  const std::vector<std::byte*> to_;
  const std::unique_ptr<gpu::Stream> stream_;
  uint32_t num_layers_ = 0;
};

// Again and again in passes of one shape: none of them is recorded, nor served
// by what was recorded of another.
TEST_F(CudaBackendTest, EachLayerWaitsForArrivingStates) {
  const auto backend = Make(/*invariant=*/true);
  auto pool = Pool(*backend);
  const std::vector<int32_t> module_ids = RandomIds(50, 5);
  const std::vector<int32_t> fresh_ids = RandomIds(9, 6);
  Logits expected, ignored;
  PrivateSpan module(*pool, 0);
  PC_ASSERT_OK(
      module.Run(*backend, module_ids, {}, LogitsWanted::kNone, &ignored));
  const KvView whole = module.PlacedAt(200);
  for (int round = 0; round < 3; ++round) {
    PrivateSpan fresh(*pool, 300);
    PC_ASSERT_OK(fresh.Run(*backend, fresh_ids, {&whole, 1}, LogitsWanted::kAll,
                           &expected));
  }
  const std::vector<const std::byte*> pages(
      whole.pages, whole.pages + backend->layout().PagesFor(50));
  for (int round = 0; round < 2; ++round) {
    const auto copies = *pool->Allocate(pages.size());
    const std::vector<const std::byte*> read(copies.begin(), copies.end());
    LateArrival late(backend->layout(), pages, copies);
    Arrival* const arrivals[] = {&late};
    KvView arriving = whole;
    arriving.pages = read.data();
    PrivateSpan fresh(*pool, 300);
    RowGroup group =
        *fresh.Append(fresh_ids, {&arriving, 1}, LogitsWanted::kAll);
    group.arrivals = arrivals;
    Logits got;
    PC_ASSERT_OK(backend->Forward({&group, 1}, &got));
    EXPECT_TRUE(SameBits(got, expected)) << round;
    EXPECT_EQ(late.num_layers(), backend->layout().num_layers);
    pool->Free(copies);
  }
}

// As the worker reads the host tier: its own copy, in groups of layers.
TEST_F(CudaBackendTest, StatesCopiedFromTheHostMeanwhileGiveTheSameBits) {
  const auto backend = Make(/*invariant=*/true);
  auto pool = Pool(*backend);
  const std::vector<int32_t> module_ids = RandomIds(50, 5);
  const std::vector<int32_t> fresh_ids = RandomIds(9, 6);
  const size_t page_bytes = backend->layout().page_bytes();
  Logits expected, got, ignored;
  PrivateSpan module(*pool, 0);
  PrivateSpan fresh(*pool, 300);
  PC_ASSERT_OK(
      module.Run(*backend, module_ids, {}, LogitsWanted::kNone, &ignored));
  KvView view = module.PlacedAt(200);
  PC_ASSERT_OK(fresh.Run(*backend, fresh_ids, {&view, 1}, LogitsWanted::kAll,
                         &expected));
  const size_t num_pages = backend->layout().PagesFor(50);
  const auto host = *TestGpu()->AllocatePinned(num_pages * page_bytes);
  const auto stream = *TestGpu()->NewStream();
  std::vector<const std::byte*> from;
  for (size_t i = 0; i < num_pages; ++i) {
    from.push_back(host.data() + i * page_bytes);
    PC_ASSERT_OK(stream->Copy(host.data() + i * page_bytes, view.pages[i],
                              page_bytes, gpu::CopyKind::kToHost));
  }
  PC_ASSERT_OK(stream->Synchronize());
  const auto copies = *pool->Allocate(num_pages);
  const std::vector<const std::byte*> read(copies.begin(), copies.end());
  {
    const auto arrival =
        *pool->memory()->StartCopyFromHost(from, copies, backend->layout());
    Arrival* const arrivals[] = {arrival.get()};
    view.pages = read.data();
    PrivateSpan again(*pool, 300);
    RowGroup group = *again.Append(fresh_ids, {&view, 1}, LogitsWanted::kAll);
    group.arrivals = arrivals;
    PC_ASSERT_OK(backend->Forward({&group, 1}, &got));
  }
  EXPECT_TRUE(SameBits(got, expected));
  pool->Free(copies);
}

TEST_F(CudaBackendTest, ManyLogitsAreComputedInBlocks) {
  TinyLlamaSpec spec = HeadSpec();
  spec.layers = 1;
  const auto backend =
      TinyCudaBackend(spec, {.batch_invariant = true, .invariant_rows = 16});
  const std::vector<int32_t> ids = RandomIds(300, 4);
  EXPECT_TRUE(
      SameBits(RunAlone(*backend, ids), RunAlone(*backend, ids, {200})));
}

}  // namespace
}  // namespace promptcache::worker
