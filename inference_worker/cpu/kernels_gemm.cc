#include <algorithm>

#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/cpu/quant_kernels.h"

namespace promptcache::worker::cpu {

// Weights of either kind, and what multiplies them.
struct Kernels::GemmWeights {
  uint32_t num_rows;  // output columns
  uint32_t num_cols;  // depth
  uint32_t num_panels;
  uint32_t panel_cols;
  const uint16_t* panels;
  size_t panel_elements;
  uint32_t block_rows;
  uint32_t tile_rows;
  bool prepare;
  absl::FunctionRef<void(const float* a, uint32_t num_rows, std::byte* out)>
      prepare_rows;
  void (*gemm)(const GemmBlock& block);
};

namespace {

// A GEMM task's multiplications with weights in cache, and the bytes of
// weights it reads: below either, more tasks cost more than they balance.
constexpr uint64_t kMinTaskProducts = 2 << 20;
constexpr uint64_t kMinTaskWeightBytes = 128 << 10;
constexpr uint64_t kMaxTasksPerThread = 16;

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How a GEMM is cut: blocks of rows times runs of panels.
struct GemmGrid {
  uint32_t block_rows = 0;
  size_t num_blocks = 0;
  size_t num_runs = 0;  // of panels, in each block
};

template <class Weights>
GemmGrid CutGemm(const Weights& weights, size_t num_rows,
                 uint32_t num_threads) {
  GemmGrid grid;
  const size_t blocks =
      (num_rows + weights.block_rows - 1) / weights.block_rows;
  grid.block_rows = static_cast<uint32_t>(std::min<size_t>(
      weights.block_rows,
      RoundUp((num_rows + blocks - 1) / blocks, weights.tile_rows)));
  grid.num_blocks = (num_rows + grid.block_rows - 1) / grid.block_rows;
  const uint64_t products =
      uint64_t{num_rows} * weights.num_rows * weights.num_cols;
  const uint64_t weight_bytes =
      weights.num_panels * weights.panel_elements * sizeof(uint16_t);
  const uint64_t wanted =
      std::max(products / kMinTaskProducts, weight_bytes / kMinTaskWeightBytes);
  const uint64_t tasks = std::clamp<uint64_t>(wanted, num_threads,
                                              num_threads * kMaxTasksPerThread);
  // A multiple of the threads, so that equal shares are equal work.
  const size_t runs = RoundUp((tasks + grid.num_blocks - 1) / grid.num_blocks,
                              grid.num_blocks == 1 ? num_threads : 1);
  // Kernels read up to 4 panels side by side.
  const size_t most = std::max<size_t>(
      weights.num_panels / 8, std::min(num_threads, weights.num_panels));
  grid.num_runs = std::clamp<size_t>(runs, 1, most);
  return grid;
}

}  // namespace

absl::StatusOr<PackedMatrix> Kernels::Pack(uint32_t num_rows, uint32_t num_cols,
                                           PackedMatrix::RowProvider provider) {
  PC_RETURN_IF_ERROR(
      ReserveScratch(isa_->prepared_bytes(isa_->block_rows, num_cols)));
  return PackedMatrix::Pack(num_rows, num_cols, isa_->layout, isa_->panel_cols,
                            provider, &pool_);
}

absl::StatusOr<QuantizedMatrix> Kernels::PackQuantized(
    uint32_t num_rows, uint32_t num_cols, QuantFormat format,
    QuantizedMatrix::RowProvider provider) {
  PC_RETURN_IF_ERROR(
      ReserveScratch(size_t{quant_->block_rows} * (num_cols / kQuantDepth) *
                     PreparedQuantBytes(format)));
  return QuantizedMatrix::Pack(num_rows, num_cols, format, provider, &pool_);
}

void Kernels::Gemm(const float* a, size_t a_stride, size_t num_rows,
                   const PackedMatrix& weights, float* c, size_t c_stride,
                   const GemmExtras& extras) {
  const uint32_t depth = weights.num_cols();
  const auto prepare = [&](const float* rows, uint32_t count, std::byte* out) {
    isa_->prepare_rows(rows, a_stride, count, depth, out);
  };
  RunGemm(a, a_stride, num_rows,
          {.num_rows = weights.num_rows(),
           .num_cols = depth,
           .num_panels = weights.num_panels(),
           .panel_cols = weights.panel_cols(),
           .panels = weights.panel(0),
           .panel_elements = weights.panel_elements(),
           .block_rows = isa_->block_rows,
           .tile_rows = isa_->tile_rows,
           .prepare = isa_->prepared_bytes(1, depth) > 0,
           .prepare_rows = prepare,
           .gemm = isa_->gemm},
          c, c_stride, extras);
}

void Kernels::Gemm(const float* a, size_t a_stride, size_t num_rows,
                   const QuantizedMatrix& weights, float* c, size_t c_stride,
                   const GemmExtras& extras) {
  const uint32_t depth = weights.num_cols();
  const QuantFormat format = weights.format();
  const auto prepare = [&](const float* rows, uint32_t count, std::byte* out) {
    quant_->prepare_rows(rows, a_stride, count, depth, format, out);
  };
  RunGemm(a, a_stride, num_rows,
          {.num_rows = weights.num_rows(),
           .num_cols = depth,
           .num_panels = weights.num_panels(),
           .panel_cols = kQuantCols,
           .panels = reinterpret_cast<const uint16_t*>(weights.panel(0)),
           .panel_elements = weights.panel_bytes() / sizeof(uint16_t),
           .block_rows = quant_->block_rows,
           .tile_rows = quant_->tile_rows,
           .prepare = true,
           .prepare_rows = prepare,
           .gemm = quant_->gemm[static_cast<size_t>(format)]},
          c, c_stride, extras);
}

void Kernels::RunGemm(const float* a, size_t a_stride, size_t num_rows,
                      const GemmWeights& weights, float* c, size_t c_stride,
                      const GemmExtras& extras) {
  if (num_rows == 0) return;
  const GemmGrid grid = CutGemm(weights, num_rows, num_threads());
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
                       .depth = weights.num_cols};
    if (weights.prepare) {
      block.a = ScratchOf(thread);
      if (thread_states_[thread].prepared_block != block_index) {
        thread_states_[thread].prepared_block = block_index;
        weights.prepare_rows(a + row * a_stride, rows, ScratchOf(thread));
      }
    }
    const auto first =
        static_cast<uint32_t>(weights.num_panels * run / grid.num_runs);
    const auto last =
        static_cast<uint32_t>(weights.num_panels * (run + 1) / grid.num_runs);
    const size_t col = size_t{first} * weights.panel_cols;
    block.panels = weights.panels + first * weights.panel_elements;
    block.panel_elements = weights.panel_elements;
    block.num_cols = std::min(last * weights.panel_cols, weights.num_rows) -
                     static_cast<uint32_t>(col);
    block.c = c + row * c_stride + col;
    block.c_stride = c_stride;
    if (extras.bias != nullptr) block.bias = extras.bias + col;
    if (extras.residual != nullptr) {
      block.residual = extras.residual + row * c_stride + col;
    }
    weights.gemm(block);
  });
}

void Kernels::LookUp(const PackedMatrix& table, std::span<const int32_t> ids,
                     float* out, size_t out_stride) {
  LookUpRows(table, ids, out, out_stride);
}

void Kernels::LookUp(const QuantizedMatrix& table, std::span<const int32_t> ids,
                     float* out, size_t out_stride) {
  LookUpRows(table, ids, out, out_stride);
}

template <class Table>
void Kernels::LookUpRows(const Table& table, std::span<const int32_t> ids,
                         float* out, size_t out_stride) {
  // Eight times: elements of a row lie apart.
  const size_t row_elements = size_t{8} * table.num_cols();
  ForRows(ids.size(), row_elements, [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      table.ReadRow(static_cast<uint32_t>(ids[i]), out + i * out_stride);
    }
  });
}

}  // namespace promptcache::worker::cpu
