// attention_sweep: every attention case against double precision.
//   attention_sweep            the whole product, about 10000 cases
//   attention_sweep 64         those of one head size
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

// only: the head size; 0: all.
int Main(bool quick, uint32_t only) {
  Totals totals;
  const auto begin = std::chrono::steady_clock::now();
  if (quick) {
    for (const AttentionCase& c : QuickCases()) Run(c, &totals);
  } else {
    for (uint32_t head_dim : kHeadDims) {
      if (only != 0 && head_dim != only) continue;
      for (ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
        for (const AttentionCase& c : SweepCases(type, head_dim, true)) {
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
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  const int only = argc > 1 && !quick ? std::atoi(argv[1]) : 0;
  return promptcache::gpu::Main(quick, static_cast<uint32_t>(only));
}
