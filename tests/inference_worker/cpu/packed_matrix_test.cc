#include "inference_worker/cpu/packed_matrix.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "tests/inference_worker/cpu/reference.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

TEST(Bf16Test, RoundsToNearestEven) {
  EXPECT_EQ(ToBf16(1.0f), 0x3f80);
  const float ulp = std::ldexp(1.0f, -7);
  EXPECT_EQ(ToBf16(1.0f + ulp / 2), 0x3f80);      // tie, to even
  EXPECT_EQ(ToBf16(1.0f + 3 * ulp / 2), 0x3f82);  // tie, to even
  EXPECT_EQ(ToBf16(1.0f + 0.51f * ulp), 0x3f81);
  EXPECT_EQ(ToBf16(-0.0f), 0x8000);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::infinity()), 0x7f80);
  // A NaN whose upper bits alone would read as infinity.
  EXPECT_TRUE(std::isnan(FromBf16(ToBf16(std::bit_cast<float>(0x7f800001u)))));
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    ASSERT_EQ(ToBf16(FromBf16(static_cast<uint16_t>(bits))), bits);
  }
}

TEST(PackedMatrixTest, RowsComeBackRoundedForEveryShapeAndKernel) {
  for (const std::string& name : Kernels::Runnable()) {
    auto kernels = MakeKernels(name, 2);
    for (uint32_t rows : {1u, 7u, 8u, 16u, 31u, 32u, 33u, 100u}) {
      for (uint32_t cols : {1u, 2u, 31u, 32u, 33u, 65u}) {
        const std::vector<float> weights = RandomFloats(rows * cols, rows);
        auto matrix = kernels->Pack(
            rows, cols, [&](uint64_t index, std::span<float> row) {
              std::copy_n(&weights[index * cols], cols, row.begin());
            });
        PC_ASSERT_OK(matrix);
        std::vector<float> row(cols);
        for (uint32_t r = 0; r < rows; ++r) {
          matrix->ReadRow(r, row.data());
          for (uint32_t c = 0; c < cols; ++c) {
            ASSERT_EQ(row[c], RoundedToBf16(weights[r * cols + c]))
                << name << " " << rows << "x" << cols << " at " << r << ","
                << c;
          }
        }
        EXPECT_EQ(reinterpret_cast<uintptr_t>(
                      matrix->panel(matrix->num_panels() - 1)) %
                      64,
                  0u);
      }
    }
  }
}

TEST(PackedMatrixTest, RefusesAnEmptyMatrix) {
  auto kernels = MakeKernels("portable", 1);
  EXPECT_THAT(kernels->Pack(0, 8, [](uint64_t, std::span<float>) {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("0 x 8")));
}

}  // namespace
}  // namespace promptcache::worker::cpu
