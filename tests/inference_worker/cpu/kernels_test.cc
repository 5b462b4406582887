#include "inference_worker/cpu/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace promptcache::worker::cpu {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

TEST(KernelsTest, AutoIsTheFirstThatRunsAndPortableAlwaysDoes) {
  const std::vector<std::string> names = Kernels::Runnable();
  EXPECT_THAT(names, Contains("portable"));
  auto kernels = Kernels::Create({.num_threads = 1});
  PC_ASSERT_OK(kernels);
  EXPECT_EQ((*kernels)->name(), names.front());
  for (const std::string& name : names) {
    auto named = Kernels::Create({.name = name, .num_threads = 2});
    PC_ASSERT_OK(named);
    EXPECT_EQ((*named)->name(), name);
    EXPECT_EQ((*named)->num_threads(), 2u);
  }
}

// The fastest that every processor with the named set has, or this one beside
// it.
TEST(KernelsTest, QuantisedWeightsHaveKernelsOfTheirOwn) {
  for (const std::string& name : Kernels::Runnable()) {
    auto kernels = Kernels::Create({.name = name, .num_threads = 1});
    PC_ASSERT_OK(kernels);
    std::string want = name;
#if defined(__x86_64__)
    if (name != "portable" && name != "avx2") {
      want = __builtin_cpu_supports("avx512vnni") ? "avx512vnni" : "avx2";
    }
    if (name == "amx" && __builtin_cpu_supports("amx-int8")) want = "amx";
#endif
    EXPECT_EQ((*kernels)->quant_name(), want);
  }
}

TEST(KernelsTest, RefusesAnUnknownNameAndOneThatCannotRunHere) {
  EXPECT_THAT(Kernels::Create({.name = "neon9"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("\"neon9\": this processor runs")));
  const std::vector<std::string> names = Kernels::Runnable();
  for (const char* name : {"avx2", "avx512", "avx512bf16", "amx"}) {
    if (std::count(names.begin(), names.end(), name) > 0) continue;
    EXPECT_THAT(
        Kernels::Create({.name = name}),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("portable")));
  }
}

}  // namespace
}  // namespace promptcache::worker::cpu
