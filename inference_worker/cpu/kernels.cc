#include "inference_worker/cpu/kernels.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cpu/attention_plan.h"
#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/quant_kernels.h"

namespace promptcache::worker::cpu {
namespace {

constexpr size_t kScratchAlignment = 4096;
// Elements below which element-wise work is not worth a parallel region.
constexpr size_t kMinElementsPerThread = 8192;

bool ProcessorHasAvx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool ProcessorHasAvx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && ProcessorHasAvx2();
#else
  return false;
#endif
}

bool ProcessorHasAvx512Vnni() {
#if defined(__x86_64__)
  return ProcessorHasAvx512() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool ProcessorHasF16c() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool ProcessorHasAvx512Bf16() {
#if defined(__x86_64__)
  return ProcessorHasAvx512() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Linux saves the tiles' registers only for processes that ask for them.
bool ProcessorHasAmx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return ProcessorHasAvx512Bf16() && __builtin_cpu_supports("amx-tile") &&
         __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool ProcessorHasAmxInt8() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-int8");
#else
  return false;
#endif
}

// vdpbf16ps does 110 GFLOP/s a core there, fp32 multiply-adds 229.
bool ProcessorHasSlowBf16() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

struct Variant {
  const IsaKernels* kernels;  // null: not built
  bool runs_here;
};

// The fastest first. By what the processor is, not by timing: workers of one
// node must agree, since the name is part of their modules' identity.
std::vector<Variant> Variants() {
  std::vector<Variant> variants = {
      {AmxKernels(), ProcessorHasAmx()},
      {Avx512Bf16Kernels(), ProcessorHasAvx512Bf16()},
      {Avx512Kernels(), ProcessorHasAvx512()},
      {Avx2Kernels(), ProcessorHasAvx2()},
      {PortableKernels(), true}};
  if (ProcessorHasSlowBf16()) std::swap(variants[1], variants[2]);
  return variants;
}

// The fastest of those that run on every processor that runs `isa`, and on this
// one. Those with vector instructions give the same bits.
const QuantKernels* QuantKernelsFor(const IsaKernels* isa) {
  if (isa == PortableKernels()) return PortableQuantKernels();
  if (isa != Avx2Kernels() && ProcessorHasAvx512Vnni()) {
    // Where `isa` is AMX, the system has granted the tiles.
    if (isa == AmxKernels() && AmxQuantKernels() != nullptr &&
        ProcessorHasAmxInt8()) {
      return AmxQuantKernels();
    }
    if (Avx512VnniQuantKernels() != nullptr) return Avx512VnniQuantKernels();
  }
  if (Avx2QuantKernels() != nullptr && ProcessorHasF16c()) {
    return Avx2QuantKernels();
  }
  return PortableQuantKernels();
}

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Kernels>> Kernels::Create(
    const Options& options) {
  bool known = options.name == "avx2" || options.name == "avx512" ||
               options.name == "avx512bf16" || options.name == "amx";
  for (const Variant& variant : Variants()) {
    if (variant.kernels == nullptr) continue;
    const bool named = options.name == variant.kernels->name;
    known = known || named;
    if (!variant.runs_here || !(named || options.name == "auto")) continue;
    std::unique_ptr<Kernels> kernels(
        new Kernels(variant.kernels, options.num_threads));
    PC_RETURN_IF_ERROR(kernels->ReserveScratch(kAttentionScratchBytes));
    return kernels;
  }
  const std::string message =
      absl::StrCat("kernels \"", options.name, "\": this processor runs ",
                   absl::StrJoin(Runnable(), ", "));
  return known ? absl::FailedPreconditionError(message)
               : absl::InvalidArgumentError(message);
}

std::vector<std::string> Kernels::Runnable() {
  std::vector<std::string> names;
  for (const Variant& variant : Variants()) {
    if (variant.kernels != nullptr && variant.runs_here) {
      names.emplace_back(variant.kernels->name);
    }
  }
  return names;
}

Kernels::Kernels(const IsaKernels* isa, uint32_t num_threads)
    : isa_(isa),
      quant_(QuantKernelsFor(isa)),
      name_(isa->name),
      pool_(num_threads),
      thread_states_(pool_.num_threads()),
      plan_(std::make_unique<AttentionPlan>()) {}

Kernels::~Kernels() = default;

const char* Kernels::quant_name() const { return quant_->name; }

absl::Status Kernels::ReserveScratch(size_t bytes_per_thread) {
  const size_t bytes = RoundUp(bytes_per_thread, kScratchAlignment);
  if (bytes <= scratch_bytes_) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(scratch_,
                      PopulatedMemory::Allocate(bytes * num_threads()));
  scratch_bytes_ = bytes;
  return absl::OkStatus();
}

void Kernels::ForRows(size_t num_rows, size_t row_elements,
                      absl::FunctionRef<void(size_t, size_t)> body) {
  const size_t wanted = num_rows * row_elements / kMinElementsPerThread;
  if (wanted <= 1 || num_threads() == 1) {
    if (num_rows > 0) body(0, num_rows);
    return;
  }
  const size_t parts = std::min({wanted, num_rows, size_t{4} * num_threads()});
  pool_.ParallelFor(parts, [&](size_t part, uint32_t) {
    body(num_rows * part / parts, num_rows * (part + 1) / parts);
  });
}

void Kernels::RmsNorm(const float* x, const float* weight, float epsilon,
                      size_t num_rows, size_t dim, float* out) {
  ForRows(num_rows, dim, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      isa_->rms_norm(x + row * dim, weight, epsilon, dim, out + row * dim);
    }
  });
}

void Kernels::RmsNormHeads(const float* weight, float epsilon, size_t num_rows,
                           size_t row_stride, size_t num_heads, size_t head_dim,
                           float* x) {
  ForRows(num_rows, num_heads * head_dim, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      for (size_t head = 0; head < num_heads; ++head) {
        float* const at = x + row * row_stride + head * head_dim;
        isa_->rms_norm(at, weight, epsilon, head_dim, at);
      }
    }
  });
}

void Kernels::LayerNorm(const float* x, const float* weight, const float* bias,
                        float epsilon, size_t num_rows, size_t dim,
                        float* out) {
  ForRows(num_rows, 2 * dim, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      isa_->layer_norm(x + row * dim, weight, bias, epsilon, dim,
                       out + row * dim);
    }
  });
}

void Kernels::Activate(Activation activation, const float* x, const float* up,
                       size_t in_stride, size_t num_rows, size_t dim,
                       float* out) {
  ForRows(num_rows, 4 * dim, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      isa_->activate(activation, x + row * in_stride,
                     up == nullptr ? nullptr : up + row * in_stride, dim,
                     out + row * dim);
    }
  });
}

void Kernels::Add(const float* y, size_t count, float* x) {
  constexpr size_t kChunk = 1024;
  ForRows((count + kChunk - 1) / kChunk, kChunk,
          [&](size_t first, size_t last) {
            const size_t begin = first * kChunk;
            const size_t end = std::min(count, last * kChunk);
            isa_->add(y + begin, end - begin, x + begin);
          });
}

void Kernels::Scale(float factor, size_t count, float* x) {
  constexpr size_t kChunk = 1024;
  ForRows((count + kChunk - 1) / kChunk, kChunk,
          [&](size_t first, size_t last) {
            const size_t begin = first * kChunk;
            const size_t end = std::min(count, last * kChunk);
            isa_->scale(factor, end - begin, x + begin);
          });
}

}  // namespace promptcache::worker::cpu
