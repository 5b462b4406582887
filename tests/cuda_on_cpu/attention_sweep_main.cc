// attention_sweep: every attention case against double precision.
//   attention_sweep            the whole product, about 10000 cases
//   attention_sweep 64         those of one head size
//   attention_sweep some       24 of each type and head size
//   attention_sweep quick      what the sanitizers and planted faults run
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "attention_sweep.h"

namespace promptcache::gpu {
namespace {

struct Totals {
  int cases = 0;
  int faults = 0;
  double worst[2] = {0, 0};  // by type
};

void Run(const AttentionCase& c, Totals* totals) {
  const AttentionOutcome outcome = RunAttentionCase(c);
  ++totals->cases;
  double& worst = totals->worst[c.type == ElementType::kBf16 ? 0 : 1];
  if (outcome.worst_error > worst) worst = outcome.worst_error;
  const bool conflicts = outcome.bank_conflicts > 0;
  if (outcome.fault.empty() && !conflicts) return;
  ++totals->faults;
  std::printf("head size %u, %s: %s\n", c.head_dim, c.name.c_str(),
              outcome.fault.empty() ? "bank conflicts" : outcome.fault.c_str());
}

enum class Cases { kAll, kSome, kQuick };

// only: the head size; 0: all.
int Main(Cases cases, uint32_t only) {
  Totals totals;
  const auto begin = std::chrono::steady_clock::now();
  if (cases == Cases::kQuick) {
    for (const AttentionCase& c : QuickCases()) Run(c, &totals);
  } else {
    for (uint32_t head_dim : kHeadDims) {
      if (only != 0 && head_dim != only) continue;
      for (ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
        for (const AttentionCase& c :
             SweepCases(type, head_dim, cases == Cases::kAll)) {
          Run(c, &totals);
        }
      }
    }
  }
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - begin;
  std::printf(
      "%d cases, %d faults; worst relative error bf16 %.2e, fp16 %.2e; %.0f "
      "s\n",
      totals.cases, totals.faults, totals.worst[0], totals.worst[1],
      seconds.count());
  return totals.faults == 0 ? 0 : 1;
}

}  // namespace
}  // namespace promptcache::gpu

int main(int argc, char** argv) {
  using promptcache::gpu::Cases;
  const char* const which = argc > 1 ? argv[1] : "0";
  const Cases cases = std::strcmp(which, "quick") == 0  ? Cases::kQuick
                      : std::strcmp(which, "some") == 0 ? Cases::kSome
                                                        : Cases::kAll;
  const int only = cases == Cases::kAll ? std::atoi(which) : 0;
  return promptcache::gpu::Main(cases, static_cast<uint32_t>(only));
}
