#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/kv_layout.h"
#include "common/kv_view.h"
#include "inference_worker/cpu/activation.h"
#include "inference_worker/cpu/distance_bias.h"
#include "inference_worker/cpu/packed_matrix.h"
#include "inference_worker/cpu/quantized_matrix.h"
#include "inference_worker/cpu/rope_table.h"
#include "inference_worker/cpu/thread_pool.h"

namespace promptcache::worker::cpu {

struct IsaKernels;
struct QuantKernels;
class AttentionPlan;

// What a GEMM adds to its product, in this order; both optional.
struct GemmExtras {
  const float* bias = nullptr;  // [N]
  // [M][N] with the stride of C; may be C itself (x += A W^T).
  const float* residual = nullptr;
};

// New keys and values of consecutive tokens of one span. Row r is token
// own.num_tokens - num_rows + r of `own`, at position + r.
struct KvWrite {
  const float* keys = nullptr;    // [num_rows][num_kv_heads][head_dim], not yet
  const float* values = nullptr;  // rotated; rows `row_stride` floats apart
  size_t row_stride = 0;
  uint32_t num_rows = 0;
  int32_t position = 0;
  KvView own;
  // Writable addresses of own.pages, parallel to it.
  std::byte* const* write_pages = nullptr;
};

// Queries of consecutive tokens of one span (see engine/backend.h, RowGroup).
struct AttentionGroup {
  const float* queries = nullptr;  // [num_rows][num_heads][head_dim], unrotated
  size_t query_stride = 0;         // floats between rows
  float* out = nullptr;            // [num_rows][num_heads][head_dim]
  size_t out_stride = 0;
  uint32_t num_rows = 0;
  int32_t position = 0;             // of row 0
  std::span<const KvView> visible;  // seen in full, in this order
  // Parallel to `visible`, or empty. Views with one number, not 0, are the same
  // tokens in the same pages, whatever their position_offset: read once for
  // all groups of few rows. No result depends on it.
  std::span<const uint32_t> view_ids;
  // The rows' own span, after those: row r sees its first
  // own.num_tokens - num_rows + r + 1 tokens. Without tokens: rows see the
  // visible views and nothing else.
  KvView own;
};

struct AttentionShape {
  uint32_t num_heads = 0;  // a multiple of layout.num_kv_heads
  uint32_t layer = 0;
  KvLayout layout;  // bf16; head_dim a multiple of 16, at most 256
  float scale = 0;  // of the logits: 1 / sqrt(head_dim)
  // May be null: nothing is rotated.
  const RopeTable* rope = nullptr;
  // ALiBi: of each head, added to the scaled logit times (position of the key
  // minus position of the query), also where that is positive. May be null.
  const float* alibi_slopes = nullptr;
  // Likewise by a table over that difference. May be null.
  const DistanceBias* distance_bias = nullptr;
  // A row sees the last `window` tokens of all that it would see in plan
  // order, itself included, whatever their positions. 0: all.
  uint32_t window = 0;
};

// Tokens whose keys and values a call of Attend needed, each block of rows
// counted by itself, and those that it read. The fewer: views that several
// groups see were read once for all of them.
struct AttentionReads {
  uint64_t needed_tokens = 0;
  uint64_t read_tokens = 0;
};

// The numeric operations of a transformer on one processor: bf16 KV and bf16 or
// quantised weights (numerics exact and fast), everything else fp32. The
// instructions are chosen at run time; threads and scratch belong to the
// object.
//
// Each row's result has one order of summation, whatever else is computed with
// it: GEMM sums over depth in order; attention splits a view at fixed token
// counts from its first token and merges the parts in plan order. So bits
// depend neither on the other rows, on how rows are grouped, nor on threads or
// pages. Between instruction sets they do differ.
//
// Thread-compatible. Pointers need float alignment only. Zero rows are fine.
class Kernels {
 public:
  struct Options {
    // "auto" (the fastest that runs here), or one of "portable", "avx2",
    // "avx512", "avx512bf16", "amx".
    std::string name = "auto";
    uint32_t num_threads = 0;  // 0: all cores of the process's affinity
  };

  // InvalidArgument for an unknown name, FailedPrecondition for one that this
  // processor cannot run.
  static absl::StatusOr<std::unique_ptr<Kernels>> Create(
      const Options& options);
  // Names that run here, the fastest first; "portable" always.
  static std::vector<std::string> Runnable();
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  const std::string& name() const { return name_; }
  // What multiplies quantised weights; not part of any identity.
  const char* quant_name() const;
  uint32_t num_threads() const { return pool_.num_threads(); }
  ThreadPool* pool() { return &pool_; }

  // Packs W[num_rows, num_cols] for Gemm and LookUp of this object.
  // Concatenate matrices of the same input (q, k, v; gate, up) into one: fewer,
  // longer regions.
  absl::StatusOr<PackedMatrix> Pack(uint32_t num_rows, uint32_t num_cols,
                                    PackedMatrix::RowProvider provider);
  // The same of weights that stay quantised (numerics=fast).
  absl::StatusOr<QuantizedMatrix> PackQuantized(
      uint32_t num_rows, uint32_t num_cols, QuantFormat format,
      QuantizedMatrix::RowProvider provider);

  // C[M, N] = A[M, K] W[N, K]^T + bias + residual. Strides in floats.
  // A must not overlap C.
  void Gemm(const float* a, size_t a_stride, size_t num_rows,
            const PackedMatrix& weights, float* c, size_t c_stride,
            const GemmExtras& extras = {});
  // With A's rows quantised to 8 bits, 32 elements at a time.
  void Gemm(const float* a, size_t a_stride, size_t num_rows,
            const QuantizedMatrix& weights, float* c, size_t c_stride,
            const GemmExtras& extras = {});

  // out[i] = row ids[i] of the matrix, widened. REQUIRES: ids in range.
  void LookUp(const PackedMatrix& table, std::span<const int32_t> ids,
              float* out, size_t out_stride);
  void LookUp(const QuantizedMatrix& table, std::span<const int32_t> ids,
              float* out, size_t out_stride);

  // out = x / sqrt(mean(x^2) + epsilon) * weight, row by row; rows of `dim`
  // floats, dense. out may be x.
  void RmsNorm(const float* x, const float* weight, float epsilon,
               size_t num_rows, size_t dim, float* out);

  // The same in place over each head of rows `row_stride` floats apart; one
  // weight [head_dim] for all heads.
  void RmsNormHeads(const float* weight, float epsilon, size_t num_rows,
                    size_t row_stride, size_t num_heads, size_t head_dim,
                    float* x);

  // out = (x - mean) / sqrt(variance + epsilon) * weight + bias, row by row;
  // bias may be null, out may be x.
  void LayerNorm(const float* x, const float* weight, const float* bias,
                 float epsilon, size_t num_rows, size_t dim, float* out);

  // out = activation(x), times `up` where that is not null; x and up have rows
  // `in_stride` floats apart, out's are dense. out may be x when in_stride ==
  // dim.
  void Activate(Activation activation, const float* x, const float* up,
                size_t in_stride, size_t num_rows, size_t dim, float* out);

  // x += y; x *= factor; `count` floats.
  void Add(const float* y, size_t count, float* x);
  void Scale(float factor, size_t count, float* x);

  // Rotates keys to position - own.position_offset and stores keys and values
  // as bf16 (nearest even). REQUIRES: rotations within the table.
  void WriteKv(const AttentionShape& shape, std::span<const KvWrite> writes);

  // Softmax attention of every row over its visible views, then its own span.
  // Never reads tokens beyond a view's num_tokens; a row that sees no token
  // gives zeros. REQUIRES: the differences of positions and offsets lie within
  // the table; own.num_tokens is 0 or at least num_rows.
  AttentionReads Attend(const AttentionShape& shape,
                        std::span<const AttentionGroup> groups);

 private:
  // Per thread: the block of A that its scratch holds, prepared.
  struct alignas(64) ThreadState {
    size_t prepared_block = 0;
  };
  struct GemmWeights;

  Kernels(const IsaKernels* isa, uint32_t num_threads);
  absl::Status ReserveScratch(size_t bytes_per_thread);
  std::byte* ScratchOf(uint32_t thread) const {
    return scratch_.data() + thread * scratch_bytes_;
  }
  void RunGemm(const float* a, size_t a_stride, size_t num_rows,
               const GemmWeights& weights, float* c, size_t c_stride,
               const GemmExtras& extras);
  template <class Table>
  void LookUpRows(const Table& table, std::span<const int32_t> ids, float* out,
                  size_t out_stride);
  // body(first_row, last_row), on all threads when it is worth it.
  void ForRows(size_t num_rows, size_t row_elements,
               absl::FunctionRef<void(size_t, size_t)> body);

  const IsaKernels* const isa_;
  const QuantKernels* const quant_;
  const std::string name_;
  ThreadPool pool_;
  size_t scratch_bytes_ = 0;  // per thread, a multiple of a page
  PopulatedMemory scratch_;
  std::vector<ThreadState> thread_states_;
  std::unique_ptr<AttentionPlan> plan_;
};

}  // namespace promptcache::worker::cpu
