#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "inference_worker/cpu/populated_memory.h"

namespace promptcache::worker {

// Rows that go through a layer's matrices together: enough to reuse a weight
// panel well, few enough for their activations to stay in the cache; whole
// blocks of every set of kernels (48, 96, 128 and 192 rows).
inline constexpr size_t kBlockRows = 384;

// Floats from a row of gate_up to the next, for `width` that are used. Rows a
// multiple of 4 KB apart share one set of the first cache, and a GEMM writes a
// line each of many of them: 384 rows of 3,072 take 1.2x as long (measured,
// AMX and VNNI). For rows that begin at a line of 64 bytes, as these do.
constexpr size_t GateUpStride(size_t width) {
  return width % 1024 == 0 ? width + 16 : width;
}

// Of one row, in floats.
struct RowWidths {
  size_t hidden = 0;
  size_t query = 0;
  size_t qkv = 0;
  size_t ffn = 0;
  size_t encoder_kv = 0;  // of a key, in elements; 0: there is no encoder
};

// Activations of one pass on the CPU, reused by the next. Rows are dense but
// for gate_up.
// Thread-compatible.
struct PassBuffers {
  size_t capacity_rows = 0;
  cpu::PopulatedMemory memory;
  // Of all rows (of an encoder-decoder: of one stack).
  float* residual = nullptr;   // [rows][hidden]
  float* qkv = nullptr;        // [rows][qkv]
  float* attention = nullptr;  // [rows][query]
  // An encoder's own keys and values: one page of all rows, one layer.
  std::byte* encoder_kv = nullptr;
  // Of one block of rows.
  float* normed = nullptr;   // [block][hidden]
  float* gate_up = nullptr;  // [block][GateUpStride]
  float* gated = nullptr;    // [block][ffn]

  // Room for so many rows; what was there is lost when it has to grow.
  // ResourceExhausted when the system refuses.
  absl::Status Reserve(size_t num_rows, const RowWidths& widths);
};

}  // namespace promptcache::worker
