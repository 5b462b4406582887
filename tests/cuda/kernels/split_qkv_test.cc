// Queries, rotated keys and values in pages, against double precision.

#include "cuda/kernels/split_qkv.h"

#include <cmath>

#include "common/float_types.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

constexpr int32_t kMaxPosition = 300;
constexpr float kEpsilon = 1e-6f;
constexpr uint16_t kUntouched = 0xABCD;

struct Shape {
  int32_t heads = 4;
  int32_t kv_heads = 2;
  int32_t head_dim = 64;
  int32_t rope_pairs = 0;
  bool interleaved = false;
  bool bias = false;
  bool norms = false;
  bool fp16 = false;
};

class SplitQkvTest : public KernelTest {
 protected:
  static constexpr int32_t kRows = 5;
  static constexpr int32_t kPageTokens = 4;
  static constexpr int32_t kPages = 3;
  static constexpr size_t kKeyOffset = 256;

  std::vector<float> Table(int32_t pairs) const {
    std::vector<float> table;
    for (int32_t p = 0; p <= kMaxPosition; ++p) {
      for (int32_t i = 0; i < pairs; ++i) {
        table.push_back(static_cast<float>(std::cos(Angle(p, i, pairs))));
      }
      for (int32_t i = 0; i < pairs; ++i) {
        table.push_back(static_cast<float>(std::sin(Angle(p, i, pairs))));
      }
    }
    return table;
  }
  static double Angle(int32_t position, int32_t pair, int32_t pairs) {
    return position * std::pow(10000.0, -static_cast<double>(pair) / pairs);
  }

  // Head `item` (q, k, v one after the other) of a row as it is stored.
  std::vector<double> Expected(const Shape& s, int32_t row, int32_t item,
                               int32_t rotation) const {
    const auto dim = static_cast<size_t>(s.head_dim);
    std::vector<double> head(dim);
    double squares = 0;
    for (size_t i = 0; i < dim; ++i) {
      const size_t column = static_cast<size_t>(item) * dim + i;
      head[i] = qkv_[static_cast<size_t>(row * stride_) + column];
      if (s.bias) head[i] += bias_[column];
      squares += head[i] * head[i] / static_cast<double>(dim);
    }
    if (s.norms && item < s.heads + s.kv_heads) {
      const auto& weight = item < s.heads ? query_norm_ : key_norm_;
      for (size_t i = 0; i < dim; ++i) {
        head[i] *= weight[i] / std::sqrt(squares + kEpsilon);
      }
    }
    if (item < s.heads || item >= s.heads + s.kv_heads) return head;
    for (int32_t pair = 0; pair < s.rope_pairs; ++pair) {
      const auto a = static_cast<size_t>(s.interleaved ? 2 * pair : pair);
      const auto b = static_cast<size_t>(s.interleaved ? 2 * pair + 1
                                                       : pair + s.rope_pairs);
      const double angle = Angle(rotation, pair, s.rope_pairs);
      const double x = head[a];
      const double y = head[b];
      head[a] = x * std::cos(angle) - y * std::sin(angle);
      head[b] = y * std::cos(angle) + x * std::sin(angle);
    }
    return head;
  }

  void ExpectHead(const Shape& s, const uint16_t* stored, int32_t row,
                  int32_t item, int32_t rotation) const {
    const auto want = Expected(s, row, item, rotation);
    for (size_t i = 0; i < want.size(); ++i) {
      const float got =
          s.fp16 ? HalfToFloat(stored[i]) : Bf16ToFloat(stored[i]);
      const double unit = s.fp16 ? 0x1p-11 : 0x1p-8;
      ASSERT_NEAR(got, want[i], std::abs(want[i]) * unit * 1.01 + 1e-4 * unit)
          << "row " << row << " item " << item << " element " << i;
    }
  }

  void Check(const Shape& s) {
    const int32_t items = s.heads + 2 * s.kv_heads;
    const size_t width = static_cast<size_t>(items * s.head_dim);
    stride_ = static_cast<int32_t>(width) + 5;
    qkv_ = RandomFloats(static_cast<size_t>(kRows * stride_));
    bias_ = RandomFloats(width);
    query_norm_ = RandomFloats(static_cast<size_t>(s.head_dim));
    key_norm_ = RandomFloats(static_cast<size_t>(s.head_dim));
    const size_t plane = static_cast<size_t>(s.kv_heads) * kPageTokens *
                         static_cast<size_t>(s.head_dim);
    const size_t page = kKeyOffset / 2 + 2 * plane;
    const std::vector<uint16_t> blank(kPages * page, kUntouched);
    uint16_t* const pages = Upload(blank);
    std::vector<KvSlot> slots;
    for (int32_t row = 0; row < kRows; ++row) {
      // From slot 3 of page 2 back to front.
      const int32_t token = kPages * kPageTokens - 1 - 2 * row;
      slots.push_back(
          {.page = reinterpret_cast<std::byte*>(
               pages + static_cast<size_t>(token / kPageTokens) * page),
           .slot = token % kPageTokens,
           .rotation = row == 1 ? -17 : 70 * row});
    }
    const size_t queries = static_cast<size_t>(kRows * s.heads * s.head_dim);
    const SplitQkvParams params = {
        .qkv = Upload(qkv_),
        .bias = s.bias ? Upload(bias_) : nullptr,
        .num_rows = kRows,
        .stride = stride_,
        .num_heads = s.heads,
        .num_kv_heads = s.kv_heads,
        .head_dim = s.head_dim,
        .query_norm = s.norms ? Upload(query_norm_) : nullptr,
        .key_norm = s.norms ? Upload(key_norm_) : nullptr,
        .epsilon = kEpsilon,
        .queries = Room<uint16_t>(queries),
        .rope = {.table =
                     s.rope_pairs > 0 ? Upload(Table(s.rope_pairs)) : nullptr,
                 .num_pairs = s.rope_pairs,
                 .interleaved = s.interleaved},
        .slots = Upload(slots),
        .page_tokens = kPageTokens,
        .key_offset_bytes = kKeyOffset,
        .value_offset_bytes = kKeyOffset + 2 * plane,
        .fp16 = s.fp16};
    PC_ASSERT_OK(Launched(LaunchSplitQkv(params, stream_->native())));
    const auto q = Download(params.queries, queries);
    const auto memory = Download(pages, blank.size());
    size_t touched = 0;
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t item = 0; item < items; ++item) {
        const uint16_t* stored = nullptr;
        const int32_t kv = item - s.heads;
        const auto dim = static_cast<size_t>(s.head_dim);
        if (kv < 0) {
          stored = q.data() + static_cast<size_t>(row * s.heads + item) * dim;
        } else {
          const KvSlot& slot = slots[static_cast<size_t>(row)];
          const auto base = static_cast<size_t>(
              reinterpret_cast<uint16_t*>(slot.page) - pages);
          const size_t head = static_cast<size_t>(kv % s.kv_heads);
          stored = memory.data() + base + kKeyOffset / 2 +
                   (kv < s.kv_heads ? 0 : plane) +
                   (head * kPageTokens + static_cast<size_t>(slot.slot)) * dim;
          touched += dim;
        }
        ExpectHead(s, stored, row, item,
                   slots[static_cast<size_t>(row)].rotation);
      }
    }
    const auto left = static_cast<size_t>(
        std::count(memory.begin(), memory.end(), kUntouched));
    EXPECT_EQ(left, memory.size() - touched);
  }

  int32_t stride_ = 0;
  std::vector<float> qkv_, bias_, query_norm_, key_norm_;
};

TEST_F(SplitQkvTest, EveryHeadSize) {
  for (const int32_t dim : {16, 32, 64, 80, 96, 128, 256}) {
    Check({.head_dim = dim, .rope_pairs = dim / 2});
  }
}

TEST_F(SplitQkvTest, BothPairingsAndPartialRotary) {
  for (const bool interleaved : {false, true}) {
    for (const int32_t pairs : {1, 8, 20, 32}) {
      Check({.rope_pairs = pairs, .interleaved = interleaved});
    }
  }
}

TEST_F(SplitQkvTest, BiasesNormsAndFp16) {
  Check({.heads = 3, .kv_heads = 1, .rope_pairs = 32, .bias = true});
  Check({.head_dim = 80, .rope_pairs = 40, .norms = true});
  Check({.rope_pairs = 32, .bias = true, .norms = true, .fp16 = true});
}

TEST_F(SplitQkvTest, WithoutRotationNothingTurns) { Check({.head_dim = 96}); }

TEST_F(SplitQkvTest, StatesOnlyAsOfAnEncoder) {
  Check({.heads = 0, .kv_heads = 3, .head_dim = 32});
}

TEST_F(SplitQkvTest, RefusesAHeadThatDoesNotFit) {
  EXPECT_EQ(LaunchSplitQkv({.num_rows = 1, .num_heads = 1, .head_dim = 272},
                           stream_->native()),
            cudaErrorInvalidValue);
  EXPECT_EQ(LaunchSplitQkv({.num_rows = 0, .num_heads = 1, .head_dim = 64},
                           stream_->native()),
            cudaSuccess);
}

}  // namespace
}  // namespace promptcache::gpu
