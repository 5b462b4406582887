#include "tools/bench/kernels/floor.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "glog/logging.h"
#include "inference_worker/cpu/populated_memory.h"

namespace promptcache::bench {
namespace {

using worker::cpu::PopulatedMemory;
using worker::cpu::ThreadPool;

double MeasureRead(ThreadPool* pool) {
  constexpr size_t kBytes = size_t{48} << 20;
  constexpr size_t kChunk = size_t{256} << 10;
  auto memory = PopulatedMemory::Allocate(kBytes);
  CHECK(memory.ok()) << memory.status();
  std::atomic<uint64_t> sink = 0;
  double best = 0;
  for (int round = 0; round < 12; ++round) {
    const Stopwatch watch(pool->num_threads());
    pool->ParallelFor(kBytes / kChunk, [&](size_t task, uint32_t) {
      const std::byte* const data = memory->data() + task * kChunk;
      typedef uint64_t V __attribute__((vector_size(16)));
      V sums[4] = {};
      for (size_t i = 0; i < kChunk; i += sizeof(sums)) {
        for (size_t j = 0; j < 4; ++j) {
          V lanes;
          std::memcpy(&lanes, data + i + j * sizeof(V), sizeof(V));
          sums[j] += lanes;
        }
      }
      sink += sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0];
    });
    best = std::max(best, kBytes / watch.Seconds());
  }
  return best;
}

double MeasureRate(uint64_t (*loop)(uint64_t), ThreadPool* pool) {
  if (loop == nullptr) return 0;
  double best = 0;
  for (int round = 0; round < 12; ++round) {
    std::atomic<uint64_t> operations = 0;
    const Stopwatch watch(pool->num_threads());
    pool->ParallelFor(4 * pool->num_threads(),
                      [&](size_t, uint32_t) { operations += loop(20'000); });
    best = std::max(best, static_cast<double>(operations) / watch.Seconds());
  }
  return best;
}

}  // namespace

Floor MeasureFloor(const std::string& kernels, const std::string& quant,
                   ThreadPool* pool) {
  PeakLoop peak = PortablePeak();
  if (kernels == "avx2") peak = Avx2Peak();
  if (kernels == "avx512" || kernels == "avx512bf16") peak = Avx512Bf16Peak();
  if (kernels == "avx512") peak.bf16 = nullptr;
  if (kernels == "amx") peak = AmxPeak();
  Floor floor = {.read_bytes_per_s = MeasureRead(pool)};
  const double fp32 = MeasureRate(peak.fp32, pool);
  const double bf16 = MeasureRate(peak.bf16, pool);
  floor.gemm_flops_per_s = peak.bf16 != nullptr ? bf16 : fp32;
  if (quant == "amx")
    floor.quant_flops_per_s = MeasureRate(AmxPeak().int8, pool);
  // By tiles it multiplies two parts of each operand that is not bf16.
  floor.attention_flops_per_s = peak.fp32 != nullptr ? fp32 : bf16 / 2;
  return floor;
}

}  // namespace promptcache::bench
