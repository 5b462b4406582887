#pragma once

#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/quant_format.h"

// GEMM with quantised weights and 8-bit activations: a table of functions, one
// translation unit a set, under the rules of isa_kernels.h.
//
// A row of activations is quantised by itself, 32 at a time: scale = the
// largest magnitude / 127, codes rounded to nearest even; below 1e-30 all are
// zero, a NaN makes the scale one. The dot product of a block is an exact
// integer; an element's sum over the blocks is one chain of
// fp32 operations in order of depth. So rows are independent bit for bit, and
// sets that fuse multiply and add have the same bits.

namespace promptcache::worker::cpu {

struct QuantKernels {
  const char* name;
  uint32_t block_rows;  // as in IsaKernels
  uint32_t tile_rows;
  void (*prepare_rows)(const float* a, size_t a_stride, uint32_t num_rows,
                       uint32_t depth, QuantFormat weights, void* out);
  // By format. GemmBlock::panels are quantised panels, `a` prepared rows.
  void (*gemm[kNumQuantFormats])(const GemmBlock& block);
};

// Of a row and block: codes, scale, and what the format needs of the sum of
// each part.
constexpr size_t PreparedQuantBytes(QuantFormat weights) {
  return kQuantDepth + (1 + ScaleParts(weights)) * sizeof(float);
}

// Null where the compiler cannot make them.
const QuantKernels* PortableQuantKernels();
const QuantKernels* Avx2QuantKernels();
const QuantKernels* Avx512VnniQuantKernels();
const QuantKernels* AmxQuantKernels();

}  // namespace promptcache::worker::cpu
