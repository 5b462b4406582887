// Products by cuBLASLt (or its stand-in) against double precision.

#include "cuda/kernels/matmul.h"

#include <cmath>

#include "common/float_types.h"
#include "tests/cuda/kernels/device_arrays.h"

namespace promptcache::gpu {
namespace {

using ::testing::Test;

class MatmulTest : public KernelTest {
 protected:
  std::unique_ptr<Matmul> Make(bool invariant, int32_t block = 16) {
    auto matmul = Matmul::Create(*device_, {.batch_invariant = invariant,
                                            .invariant_rows = block,
                                            .workspace_bytes = 1 << 20});
    if (absl::IsNotFound(matmul.status())) return nullptr;
    PC_EXPECT_OK(matmul);
    return *std::move(matmul);
  }
  std::vector<uint16_t> RandomBf16(size_t count) {
    std::vector<uint16_t> bits;
    for (const float v : RandomFloats(count)) bits.push_back(FloatToBf16(v));
    return bits;
  }
  // x, padded with what the memory held.
  uint16_t* Padded(const std::vector<uint16_t>& x, size_t elements) {
    std::vector<uint16_t> all = x;
    all.resize(elements, 0xFFFF);  // NaN
    return Upload(all);
  }
  std::vector<float> Run(Matmul& matmul, const std::vector<uint16_t>& x,
                         const std::vector<uint16_t>& w, int32_t rows,
                         int32_t cols, int32_t depth,
                         const std::vector<float>& onto = {}) {
    const auto padded = static_cast<size_t>(matmul.PaddedRows(rows));
    std::vector<float> y(padded * static_cast<size_t>(cols), NAN);
    std::copy(onto.begin(), onto.end(), y.begin());
    const MatmulParams params = {
        .x = Padded(x, padded * static_cast<size_t>(depth)),
        .weights = Upload(w),
        .y = Upload(y),
        .num_rows = rows,
        .num_cols = cols,
        .depth = depth,
        .accumulate = !onto.empty()};
    PC_EXPECT_OK(matmul.Run(params, stream_->native()));
    return Download(params.y, static_cast<size_t>(rows * cols));
  }
};

TEST_F(MatmulTest, IsTheProductOfBf16WithFp32Sums) {
  for (const bool invariant : {false, true}) {
    const auto matmul = Make(invariant);
    if (matmul == nullptr) GTEST_SKIP() << "no cuBLASLt";
    for (const auto& [rows, cols, depth] :
         {std::tuple{1, 24, 64}, {17, 40, 96}, {33, 8, 264}}) {
      const size_t m = static_cast<size_t>(rows), n = static_cast<size_t>(cols),
                   k = static_cast<size_t>(depth);
      const auto x = RandomBf16(m * k);
      const auto w = RandomBf16(n * k);
      const auto before = RandomFloats(m * n);
      const auto y = Run(*matmul, x, w, rows, cols, depth);
      const auto sum = Run(*matmul, x, w, rows, cols, depth, before);
      for (size_t i = 0; i < m * n; ++i) {
        double want = 0;
        double size = 0;
        for (size_t l = 0; l < k; ++l) {
          const double term = double{Bf16ToFloat(x[i / n * k + l])} *
                              Bf16ToFloat(w[i % n * k + l]);
          want += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(y[i], want, 1e-5 * size) << rows << " " << i;
        ASSERT_NEAR(sum[i], want + before[i], 1e-5 * size + 1e-6);
      }
    }
  }
}

TEST_F(MatmulTest, InvariantRowsHaveTheSameBitsInAnyBatch) {
  const auto matmul = Make(/*invariant=*/true);
  if (matmul == nullptr) GTEST_SKIP() << "no cuBLASLt";
  constexpr int32_t kCols = 48, kDepth = 136;
  const auto x = RandomBf16(40 * kDepth);
  const auto w = RandomBf16(kCols * kDepth);
  const auto all = Run(*matmul, x, w, 40, kCols, kDepth);
  for (const int32_t row : {0, 7, 16, 39}) {
    const std::vector<uint16_t> one(x.begin() + row * kDepth,
                                    x.begin() + (row + 1) * kDepth);
    const auto alone = Run(*matmul, one, w, 1, kCols, kDepth);
    const std::vector<float> among(all.begin() + row * kCols,
                                   all.begin() + (row + 1) * kCols);
    EXPECT_EQ(alone, among) << row;
  }
}

TEST_F(MatmulTest, PaddingNeverFallsAndIsSmall) {
  const auto free = Make(false);
  const auto fixed = Make(true, 128);
  if (free == nullptr) GTEST_SKIP() << "no cuBLASLt";
  int32_t before = 0;
  for (int32_t rows = 1; rows < 3000; ++rows) {
    const int32_t padded = free->PaddedRows(rows);
    ASSERT_GE(padded, rows);
    ASSERT_GE(padded, before);
    ASSERT_LE(padded, rows < 64 ? rows + 15 : rows + rows / 4);
    ASSERT_EQ(fixed->PaddedRows(rows), (rows + 127) / 128 * 128);
    before = padded;
  }
  EXPECT_EQ(free->PaddedRows(1), 1);
}

}  // namespace
}  // namespace promptcache::gpu
