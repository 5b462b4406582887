// Results depend on nothing but what a row is and sees (the engine's README,
// "What must stay true"), for every set of kernels that runs here and for both
// numerics.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>

#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/private_span.h"
#include "tests/inference_worker/engine/tiny_model.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using Ids = std::span<const int32_t>;
using Logits = std::vector<float>;

class BitEqualityTest
    : public ::testing::TestWithParam<std::tuple<std::string, Numerics>> {
 protected:
  std::unique_ptr<Backend> Make(uint32_t threads = 2,
                                uint32_t page_tokens = 16) {
    const auto& [kernels, numerics] = GetParam();
    return TinyBackend(
        {.spec = numerics == Numerics::kFast ? QuantizedSpec() : OddSpec(),
         .kernels = kernels,
         .threads = threads,
         .page_tokens = page_tokens,
         .numerics = numerics});
  }
};

// All logits of `ids` as a span of its own, in passes of `chunks` rows (the
// last one repeats).
Logits RunChunked(Backend& backend, PrivateSpan& span, Ids ids,
                  const std::vector<size_t>& chunks,
                  std::span<const KvView> visible = {}) {
  Logits all;
  Logits logits;
  for (size_t first = 0, i = 0; first < ids.size(); ++i) {
    const size_t count =
        std::min(chunks[std::min(i, chunks.size() - 1)], ids.size() - first);
    PC_EXPECT_OK(span.Run(backend, ids.subspan(first, count), visible,
                          LogitsWanted::kAll, &logits));
    all.insert(all.end(), logits.begin(), logits.end());
    first += count;
  }
  return all;
}

Logits RunAlone(Backend& backend, Ids ids,
                const std::vector<size_t>& chunks = {100000}) {
  auto pool = Pool(backend);
  PrivateSpan span(*pool, 0);
  return RunChunked(backend, span, ids, chunks);
}

std::vector<std::byte> Bytes(const PrivateSpan& span, const KvLayout& layout) {
  std::vector<std::byte> bytes;
  const KvView view = span.PlacedAt(0);
  for (uint64_t p = 0; p < layout.PagesFor(view.num_tokens); ++p) {
    bytes.insert(bytes.end(), view.pages[p],
                 view.pages[p] + layout.page_bytes());
  }
  return bytes;
}

TEST_P(BitEqualityTest, OnePassOrManyChunks) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> ids = RandomIds(700, 1);
  PrivateSpan whole(*pool, 0);
  const Logits expected = RunChunked(*backend, whole, ids, {700});
  for (const auto& chunks :
       {std::vector<size_t>{1, 7, 64, 130, 3}, {256}, {17, 511, 1}}) {
    PrivateSpan span(*pool, 0);
    EXPECT_TRUE(SameBits(RunChunked(*backend, span, ids, chunks), expected));
    EXPECT_EQ(Bytes(span, backend->layout()), Bytes(whole, backend->layout()));
  }
}

TEST_P(BitEqualityTest, TokenByToken) {
  auto backend = Make();
  const std::vector<int32_t> ids = RandomIds(90, 2);
  EXPECT_TRUE(SameBits(RunAlone(*backend, ids, {1}), RunAlone(*backend, ids)));
}

TEST_P(BitEqualityTest, AloneOrAmongOthers) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> texts[] = {RandomIds(37, 3), RandomIds(1, 4),
                                        RandomIds(300, 5), RandomIds(16, 6)};
  std::vector<PrivateSpan> spans;
  spans.reserve(std::size(texts));
  std::vector<RowGroup> groups;
  for (const auto& text : texts) {
    spans.emplace_back(*pool, 0);
    groups.push_back(*spans.back().Append(text, {}, LogitsWanted::kAll));
  }
  Logits together;
  PC_ASSERT_OK(backend->Forward(groups, &together));
  auto rest = std::span<const float>(together);
  for (const auto& text : texts) {
    const Logits alone = RunAlone(*backend, text);
    EXPECT_TRUE(SameBits(rest.first(alone.size()), alone)) << text.size();
    rest = rest.subspan(alone.size());
  }
  EXPECT_TRUE(rest.empty());
}

TEST_P(BitEqualityTest, DecodingAloneOrInABatch) {
  auto backend = Make();
  auto pool = Pool(*backend);
  std::vector<std::vector<int32_t>> texts;
  std::vector<Logits> expected;
  for (uint32_t i = 0; i < 11; ++i) {
    texts.push_back(RandomIds(5 + 40 * i, 20 + i));
    const Logits all = RunAlone(*backend, texts.back());
    expected.emplace_back(all.end() - backend->vocab_size(), all.end());
  }
  std::vector<PrivateSpan> spans;
  spans.reserve(texts.size());
  std::vector<RowGroup> last_rows;
  Logits logits;
  for (const auto& text : texts) {
    PrivateSpan& span = spans.emplace_back(*pool, 0);
    PC_ASSERT_OK(span.Run(*backend, Ids(text).first(text.size() - 1), {},
                          LogitsWanted::kNone, &logits));
    last_rows.push_back(
        *span.Append(Ids(text).last(1), {}, LogitsWanted::kLast));
  }
  PC_ASSERT_OK(backend->Forward(last_rows, &logits));
  for (size_t i = 0; i < texts.size(); ++i) {
    const size_t vocab = backend->vocab_size();
    EXPECT_TRUE(
        SameBits(std::span(logits).subspan(i * vocab, vocab), expected[i]))
        << i;
  }
}

// What requests that import one module are: the same pages, in page tables of
// their own, at places of their own, before texts of their own.
TEST_P(BitEqualityTest, AloneOrAmongOthersThatSeeTheSameModule) {
  auto backend = Make(/*threads=*/3);
  auto pool = Pool(*backend);
  PrivateSpan module(*pool, 0);
  Logits logits;
  PC_ASSERT_OK(module.Run(*backend, RandomIds(330, 30), {}, LogitsWanted::kNone,
                          &logits));
  constexpr size_t kRequests = 7;
  std::vector<KvView> views;
  std::vector<std::vector<const std::byte*>> tables;
  std::vector<std::vector<int32_t>> texts;
  for (uint32_t i = 0; i < kRequests; ++i) {
    KvView view = module.PlacedAt(i < 3 ? 0 : static_cast<int32_t>(10 * i));
    const uint64_t pages = backend->layout().PagesFor(view.num_tokens);
    tables.emplace_back(view.pages, view.pages + pages);
    view.pages = tables.back().data();
    views.push_back(view);
    texts.push_back(RandomIds(i == 5 ? 60 : 1 + i % 3, 31 + i));
  }
  const auto append = [&](PrivateSpan& span, size_t i) {
    return *span.Append(texts[i], {&views[i], 1}, LogitsWanted::kAll);
  };
  std::vector<PrivateSpan> spans;
  spans.reserve(kRequests);
  std::vector<RowGroup> groups;
  for (size_t i = 0; i < kRequests; ++i) {
    groups.push_back(append(spans.emplace_back(*pool, 400), i));
  }
  Logits together;
  PC_ASSERT_OK(backend->Forward(groups, &together));
  auto rest = std::span<const float>(together);
  for (size_t i = 0; i < kRequests; ++i) {
    PrivateSpan span(*pool, 400);
    const RowGroup group = append(span, i);
    PC_ASSERT_OK(backend->Forward({&group, 1}, &logits));
    EXPECT_TRUE(SameBits(rest.first(logits.size()), logits)) << i;
    rest = rest.subspan(logits.size());
  }
}

TEST_P(BitEqualityTest, AnyNumberOfThreads) {
  const std::vector<int32_t> ids = RandomIds(333, 7);
  const Logits expected = RunAlone(*Make(/*threads=*/1), ids, {300, 1});
  for (const uint32_t threads : {2u, 3u}) {
    EXPECT_TRUE(SameBits(RunAlone(*Make(threads), ids, {300, 1}), expected))
        << threads;
  }
}

TEST_P(BitEqualityTest, AnyPageSize) {
  const std::vector<int32_t> ids = RandomIds(150, 8);
  const Logits expected = RunAlone(*Make(2, 16), ids, {100, 1});
  for (const uint32_t page_tokens : {1u, 5u, 64u}) {
    EXPECT_TRUE(
        SameBits(RunAlone(*Make(2, page_tokens), ids, {100, 1}), expected))
        << page_tokens;
  }
}

TEST_P(BitEqualityTest, ScatteredPagesAndAStartInsideOne) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> ids = RandomIds(200, 9);
  const Logits expected = RunAlone(*backend, ids);
  std::vector<std::byte*> pages = *pool->Allocate(14);
  std::ranges::shuffle(pages, std::mt19937(1));
  for (const uint32_t first_token : {0u, 5u, 15u}) {
    const RowGroup group = {.tokens = ids,
                            .own = {.pages = pages.data(),
                                    .first_token = first_token,
                                    .num_tokens = 200},
                            .own_write_pages = pages.data(),
                            .logits = LogitsWanted::kAll};
    Logits logits;
    PC_ASSERT_OK(backend->Forward({&group, 1}, &logits));
    EXPECT_TRUE(SameBits(logits, expected)) << first_token;
  }
  pool->Free(pages);
}

TEST_P(BitEqualityTest, APlanAnywhereInTheContext) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> module_ids = RandomIds(50, 10);
  const std::vector<int32_t> fresh_ids = RandomIds(9, 11);
  PrivateSpan module(*pool, 0);
  Logits expected;
  PC_ASSERT_OK(
      module.Run(*backend, module_ids, {}, LogitsWanted::kNone, &expected));
  for (const int32_t start : {0, 1, 1000, 3000}) {
    const KvView view = module.PlacedAt(start);
    PrivateSpan fresh(*pool, start + 60);
    const Logits logits =
        RunChunked(*backend, fresh, fresh_ids, {4}, {&view, 1});
    if (start == 0) expected = logits;
    EXPECT_TRUE(SameBits(logits, expected)) << start;
  }
}

// A preamble, a module that saw it, and fresh text; everything as the cache
// would find it (`in_one_pass` false) or as a miss computes it.
Logits RunModules(Backend& backend, PrivatePages& pool, bool in_one_pass) {
  const std::vector<int32_t> preamble_ids = RandomIds(20, 12);
  const std::vector<int32_t> module_ids = RandomIds(123, 13);
  const std::vector<int32_t> fresh_ids = RandomIds(31, 14);
  PrivateSpan preamble(pool, 0);
  PrivateSpan module(pool, 20);
  PrivateSpan fresh(pool, 300);
  std::vector<RowGroup> groups;
  Logits logits;
  const auto run = [&](const RowGroup& group, bool flush) {
    groups.push_back(group);
    if (in_one_pass && !flush) return;
    PC_EXPECT_OK(backend.Forward(groups, &logits));
    groups.clear();
  };
  run(*preamble.Append(preamble_ids, {}, LogitsWanted::kNone), false);
  const KvView context = preamble.PlacedAt(0);
  run(*module.Append(module_ids, {&context, 1}, LogitsWanted::kNone), false);
  // The module twice, at two places.
  const KvView seen[] = {context, module.PlacedAt(150), module.PlacedAt(20)};
  run(*fresh.Append(fresh_ids, seen, LogitsWanted::kAll), true);
  return logits;
}

TEST_P(BitEqualityTest, ModulesOfTheSamePassOrOfAnEarlierOne) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const Logits cached = RunModules(*backend, *pool, /*in_one_pass=*/false);
  const Logits missed = RunModules(*backend, *pool, /*in_one_pass=*/true);
  EXPECT_EQ(cached.size(), 31 * backend->vocab_size());
  EXPECT_TRUE(SameBits(cached, missed));
}

TEST_P(BitEqualityTest, LogitsOfTheLastRowOrOfAll) {
  auto backend = Make();
  auto pool = Pool(*backend);
  const std::vector<int32_t> ids = RandomIds(300, 15);
  const Logits all = RunAlone(*backend, ids);
  PrivateSpan span(*pool, 0);
  Logits last;
  PC_ASSERT_OK(span.Run(*backend, ids, {}, LogitsWanted::kLast, &last));
  EXPECT_TRUE(
      SameBits(last, std::span<const float>(all).last(backend->vocab_size())));
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, BitEqualityTest,
    ::testing::Combine(::testing::ValuesIn(cpu::Kernels::Runnable()),
                       ::testing::Values(Numerics::kExact, Numerics::kFast)),
    [](const auto& test) {
      return std::get<0>(test.param) +
             (std::get<1>(test.param) == Numerics::kFast ? "_fast" : "");
    });

}  // namespace
}  // namespace promptcache::worker
