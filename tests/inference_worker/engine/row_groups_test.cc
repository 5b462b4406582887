#include "inference_worker/engine/row_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <vector>

#include "inference_worker/engine/sampler.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr PassLimits kLimits = {
    .layout = {.num_layers = 1,
               .num_kv_heads = 1,
               .head_dim = 16,
               .page_tokens = 4},
    .vocab_size = 100,
    .max_distance = 63,
};

// Six rows at positions 10..15 after two earlier tokens of their span, seeing
// one view of five tokens; everything in range. Tests damage one thing.
struct Pass {
  std::vector<std::byte> memory{64};
  std::vector<int32_t> tokens = {0, 1, 2, 3, 98, 99};
  std::vector<std::byte*> pages = {memory.data(), memory.data(), memory.data()};
  std::vector<KvView> views = {
      {.pages = pages.data(), .first_token = 3, .num_tokens = 5}};
  RowGroup group = {.tokens = tokens,
                    .position = 10,
                    .visible = views,
                    .own = {.pages = pages.data(),
                            .num_tokens = 8,
                            .position_offset = 6,
                            .local_position = 2},
                    .own_write_pages = pages.data()};

  absl::Status Check() const {
    const RowGroup groups[] = {RowGroup{}, group};
    return CheckRowGroups(groups, kLimits);
  }
};

TEST(CheckRowGroupsTest, AcceptsWhatIsInRange) {
  PC_EXPECT_OK(Pass().Check());
  PC_EXPECT_OK(CheckRowGroups({}, kLimits));
}

// A segment of two groups of the encoder, then the decoder, which sees it.
TEST(CheckRowGroupsTest, PartsAreThoseOfTheModel) {
  PassLimits limits = kLimits;
  limits.encoder_decoder = true;
  const Pass pass;
  RowGroup encoder = pass.group;
  encoder.part = RowPart::kEncoder;
  encoder.visible = {};
  encoder.own.num_tokens = 6;
  encoder.own.local_position = 4;
  RowGroup more = encoder;
  more.part = RowPart::kEncoderContinued;
  const auto check = [&limits](std::vector<RowGroup> groups) {
    return CheckRowGroups(groups, limits);
  };
  PC_EXPECT_OK(check({encoder, more, pass.group}));
  const auto refused = [](const char* why) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why));
  };
  EXPECT_THAT(check({more}), refused("continued that was not begun"));
  EXPECT_THAT(check({pass.group, more}), refused("was not begun"));
  RowGroup damaged = pass.group;
  damaged.visible = {};
  EXPECT_THAT(check({damaged}), refused("see nothing of an encoder"));
  damaged = encoder;
  damaged.visible = pass.views;
  EXPECT_THAT(check({damaged}), refused("see 1 views"));
  damaged = encoder;
  damaged.logits = LogitsWanted::kLast;
  EXPECT_THAT(check({damaged}), refused("have no logits"));
  damaged = encoder;
  damaged.own = pass.group.own;
  EXPECT_THAT(check({damaged}), refused("must be all"));
  limits.encoder_decoder = false;
  EXPECT_THAT(check({encoder}), refused("does not have"));
}

TEST(CheckRowGroupsTest, AChoiceIsOfALastRowWhereChoicesAreMade) {
  PassLimits limits = kLimits;
  limits.chooses_tokens = true;
  TokenChoice choice;
  Pass pass;
  pass.group.choice = &choice;
  pass.group.logits = LogitsWanted::kLast;
  const auto check = [&](const PassLimits& by) {
    return CheckRowGroups({&pass.group, 1}, by);
  };
  const auto refused = [](const char* why) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why));
  };
  PC_EXPECT_OK(check(limits));
  EXPECT_THAT(check(kLimits), refused("this backend does not do"));
  pass.group.logits = LogitsWanted::kAll;
  EXPECT_THAT(check(limits), refused("not after one last row"));
  pass.group.logits = LogitsWanted::kLast;
  choice.options.top_p = 0;
  EXPECT_THAT(check(limits), refused("top_p is 0"));
}

TEST(CheckRowGroupsTest, LearnedPositionsAreThoseOfTheTable) {
  PassLimits limits = kLimits;
  limits.num_positions = 16;
  Pass pass;
  PC_EXPECT_OK(CheckRowGroups({&pass.group, 1}, limits));
  for (const int32_t offset : {1, -11}) {
    pass.group.embedding_position_offset = offset;
    EXPECT_THAT(CheckRowGroups({&pass.group, 1}, limits),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("the 16 that the model has learned")));
    // Without a table it means nothing.
    PC_EXPECT_OK(CheckRowGroups({&pass.group, 1}, kLimits));
  }
}

struct Damage {
  const char* name;
  std::function<void(Pass&)> apply;
  const char* message;
};

class DamagedRowGroupTest : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedRowGroupTest, IsRefusedWithTheNumbers) {
  Pass pass;
  GetParam().apply(pass);
  EXPECT_THAT(pass.Check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                     AllOf(HasSubstr("row group 1"),
                                           HasSubstr(GetParam().message))));
}

const Damage kDamages[] = {
    {"NegativeToken", [](Pass& p) { p.tokens[2] = -1; }, "token 2 is -1"},
    {"TokenBeyondVocabulary", [](Pass& p) { p.tokens[5] = 100; },
     "token 5 is 100, the vocabulary has 100"},
    {"FewerOwnTokensThanRows",
     [](Pass& p) {
       p.group.own.num_tokens = 5;
       p.group.position = 7;
     },
     "5 tokens, fewer than 6 rows"},
    {"PositionOtherThanTheOwnView", [](Pass& p) { p.group.position = 11; },
     "at position 11, by the own view at 10"},
    {"NoOwnTable", [](Pass& p) { p.group.own.pages = nullptr; },
     "page table is null"},
    {"NoWriteTable", [](Pass& p) { p.group.own_write_pages = nullptr; },
     "write page table is null"},
    {"NullPage", [](Pass& p) { p.pages[1] = nullptr; }, "page table[1]"},
    {"NoViewTable", [](Pass& p) { p.views[0].pages = nullptr; },
     "view 0: page table is null"},
    {"ViewTooLong", [](Pass& p) { p.views[0].num_tokens = 65; },
     "view 0: local positions 0 to 64"},
    {"ViewBeyondAllBounds",
     [](Pass& p) {
       p.views[0].first_token = std::numeric_limits<uint32_t>::max();
     },
     "view 0: view of tokens 4294967295 + 5"},
    {"ViewTooFarBehind", [](Pass& p) { p.views[0].position_offset = -49; },
     "view 0: positions 10 to 15 are too far from the origin -49"},
    {"ViewTooFarAhead", [](Pass& p) { p.views[0].position_offset = 74; },
     "too far from the origin 74"},
    {"OffsetThatWouldOverflow",
     [](Pass& p) {
       p.views[0].position_offset = std::numeric_limits<int32_t>::min();
     },
     "too far from the origin -2147483648"},
    {"OwnOriginTooFar",
     [](Pass& p) {
       p.group.own.local_position = 60;
       p.group.position = 68;
     },
     "local positions 60 to 67"},
};

INSTANTIATE_TEST_SUITE_P(All, DamagedRowGroupTest,
                         ::testing::ValuesIn(kDamages),
                         [](const auto& test) { return test.param.name; });

TEST(CheckRowGroupsTest, TheEndsOfTheRangesAreIn) {
  Pass pass;
  pass.views[0].position_offset = 15 - 63;
  PC_EXPECT_OK(pass.Check());
  pass.views[0].position_offset = 10 + 63;
  PC_EXPECT_OK(pass.Check());
}

TEST(CheckRowGroupsTest, PagesThatOnlyEarlierTokensUseNeedNoWriteAddress) {
  Pass pass;
  std::vector<std::byte*> write = {nullptr, pass.pages[1], pass.pages[2]};
  pass.group.own_write_pages = write.data();
  EXPECT_THAT(pass.Check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("write page table[0]")));
  pass.group.tokens = pass.group.tokens.first(4);
  pass.group.position = 12;
  PC_EXPECT_OK(pass.Check());
}

TEST(NumLogitRowsTest, CountsWhatIsWanted) {
  Pass pass;
  EXPECT_EQ(NumLogitRows(pass.group), 0u);
  pass.group.logits = LogitsWanted::kLast;
  EXPECT_EQ(NumLogitRows(pass.group), 1u);
  pass.group.logits = LogitsWanted::kAll;
  EXPECT_EQ(NumLogitRows(pass.group), 6u);
  pass.group.tokens = {};
  pass.group.logits = LogitsWanted::kLast;
  EXPECT_EQ(NumLogitRows(pass.group), 0u);
}

}  // namespace
}  // namespace promptcache::worker
