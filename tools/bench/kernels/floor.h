#pragma once

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "inference_worker/cpu/thread_pool.h"

namespace promptcache::bench {

// Seconds since it was made: of this thread's processor time when the work has
// one thread (other load then counts for little), else of the clock's.
class Stopwatch {
 public:
  explicit Stopwatch(uint32_t num_threads)
      : clock_(num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC),
        start_(Now()) {}
  double Seconds() const { return Now() - start_; }

 private:
  double Now() const {
    timespec time;
    clock_gettime(clock_, &time);
    return static_cast<double>(time.tv_sec) +
           1e-9 * static_cast<double>(time.tv_nsec);
  }
  const clockid_t clock_;
  const double start_;
};

// Dependent-free multiply-adds in registers, as many as the processor takes:
// operations (2 a multiply-add) done by one call. Null where not built.
struct PeakLoop {
  uint64_t (*fp32)(uint64_t rounds) = nullptr;
  uint64_t (*bf16)(uint64_t rounds) = nullptr;  // null: has none
  uint64_t (*int8)(uint64_t rounds) = nullptr;  // likewise
};
PeakLoop PortablePeak();
PeakLoop Avx2Peak();
PeakLoop Avx512Bf16Peak();
PeakLoop AmxPeak();  // no fp32

// What nothing on this machine can be faster than, measured now.
struct Floor {
  double read_bytes_per_s = 0;
  double gemm_flops_per_s = 0;  // of the instructions GEMM uses
  // Of those of quantised GEMM by tiles; 0: not measured.
  double quant_flops_per_s = 0;
  double attention_flops_per_s = 0;
};
// REQUIRES: the processor runs `kernels`, and `quant` for quantised weights.
Floor MeasureFloor(const std::string& kernels, const std::string& quant,
                   worker::cpu::ThreadPool* pool);

}  // namespace promptcache::bench
