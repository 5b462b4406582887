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

namespace promptcache::worker::cpu {
namespace {

constexpr size_t kScratchAlignment = 4096;
// Elements below which element-wise work is not worth a parallel region.
constexpr size_t kMinElementsPerThread = 8192;
// A GEMM task's multiplications with weights in cache, and the bytes of
// weights it reads: below either, more tasks cost more than they balance.
constexpr uint64_t kMinTaskProducts = 2 << 20;
constexpr uint64_t kMinTaskWeightBytes = 128 << 10;
constexpr uint64_t kMaxTasksPerThread = 16;

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

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a GEMM is cut: blocks of rows times runs of panels.
struct GemmGrid {
  uint32_t block_rows = 0;
  size_t num_blocks = 0;
  size_t num_runs = 0;  // of panels, in each block
};

GemmGrid CutGemm(const IsaKernels& isa, const PackedMatrix& weights,
                 size_t num_rows, uint32_t num_threads) {
  GemmGrid grid;
  const size_t blocks = (num_rows + isa.block_rows - 1) / isa.block_rows;
  grid.block_rows = static_cast<uint32_t>(std::min<size_t>(
      isa.block_rows,
      RoundUp((num_rows + blocks - 1) / blocks, isa.tile_rows)));
  grid.num_blocks = (num_rows + grid.block_rows - 1) / grid.block_rows;
  const uint64_t products =
      uint64_t{num_rows} * weights.num_rows() * weights.num_cols();
  const uint64_t wanted = std::max(products / kMinTaskProducts,
                                   weights.num_bytes() / kMinTaskWeightBytes);
  const uint64_t tasks = std::clamp<uint64_t>(wanted, num_threads,
                                              num_threads * kMaxTasksPerThread);
  // A multiple of the threads, so that equal shares are equal work.
  const size_t runs = RoundUp((tasks + grid.num_blocks - 1) / grid.num_blocks,
                              grid.num_blocks == 1 ? num_threads : 1);
  // Kernels read up to 4 panels side by side.
  const size_t most = std::max<size_t>(
      weights.num_panels() / 8, std::min(num_threads, weights.num_panels()));
  grid.num_runs = std::clamp<size_t>(runs, 1, most);
  return grid;
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
      name_(isa->name),
      pool_(num_threads),
      thread_states_(pool_.num_threads()),
      plan_(std::make_unique<AttentionPlan>()) {}

Kernels::~Kernels() = default;

absl::Status Kernels::ReserveScratch(size_t bytes_per_thread) {
  const size_t bytes = RoundUp(bytes_per_thread, kScratchAlignment);
  if (bytes <= scratch_bytes_) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(scratch_,
                      PopulatedMemory::Allocate(bytes * num_threads()));
  scratch_bytes_ = bytes;
  return absl::OkStatus();
}

absl::StatusOr<PackedMatrix> Kernels::Pack(uint32_t num_rows, uint32_t num_cols,
                                           PackedMatrix::RowProvider provider) {
  PC_RETURN_IF_ERROR(
      ReserveScratch(isa_->prepared_bytes(isa_->block_rows, num_cols)));
  return PackedMatrix::Pack(num_rows, num_cols, isa_->layout, isa_->panel_cols,
                            provider, &pool_);
}

void Kernels::Gemm(const float* a, size_t a_stride, size_t num_rows,
                   const PackedMatrix& weights, float* c, size_t c_stride,
                   const GemmExtras& extras) {
  if (num_rows == 0) return;
  const GemmGrid grid = CutGemm(*isa_, weights, num_rows, num_threads());
  const uint32_t depth = weights.num_cols();
  const bool prepare = isa_->prepared_bytes(1, depth) > 0;
  CHECK_LE(isa_->prepared_bytes(grid.block_rows, depth), scratch_bytes_);
  for (ThreadState& state : thread_states_) state.prepared_block = SIZE_MAX;
  pool_.ParallelFor(grid.num_blocks * grid.num_runs, [&](size_t task,
                                                         uint32_t thread) {
    const size_t block_index = task / grid.num_runs;
    const size_t run = task % grid.num_runs;
    const size_t row = block_index * grid.block_rows;
    const auto rows = static_cast<uint32_t>(
        std::min<size_t>(grid.block_rows, num_rows - row));
    GemmBlock block = {.a = a + row * a_stride,
                       .a_stride = a_stride,
                       .num_rows = rows,
                       .depth = depth};
    if (prepare) {
      block.a = ScratchOf(thread);
      if (thread_states_[thread].prepared_block != block_index) {
        thread_states_[thread].prepared_block = block_index;
        isa_->prepare_rows(a + row * a_stride, a_stride, rows, depth,
                           ScratchOf(thread));
      }
    }
    const auto first =
        static_cast<uint32_t>(weights.num_panels() * run / grid.num_runs);
    const auto last =
        static_cast<uint32_t>(weights.num_panels() * (run + 1) / grid.num_runs);
    const size_t col = size_t{first} * weights.panel_cols();
    block.panels = weights.panel(first);
    block.panel_elements = weights.panel_elements();
    block.num_cols = std::min(last * weights.panel_cols(), weights.num_rows()) -
                     static_cast<uint32_t>(col);
    block.c = c + row * c_stride + col;
    block.c_stride = c_stride;
    if (extras.bias != nullptr) block.bias = extras.bias + col;
    if (extras.residual != nullptr) {
      block.residual = extras.residual + row * c_stride + col;
    }
    isa_->gemm(block);
  });
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

void Kernels::LookUp(const PackedMatrix& table, std::span<const int32_t> ids,
                     float* out, size_t out_stride) {
  // Eight times: elements of a row lie apart.
  ForRows(
      ids.size(), size_t{8} * table.num_cols(), [&](size_t first, size_t last) {
        for (size_t i = first; i < last; ++i) {
          table.ReadRow(static_cast<uint32_t>(ids[i]), out + i * out_stride);
        }
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
