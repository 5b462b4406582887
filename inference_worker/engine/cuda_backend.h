#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

struct CudaBackendOptions {
  gpu::Device* device = nullptr;  // must outlive the backend
  Numerics numerics = Numerics::kExact;
  // A row's bits then depend on what it is and sees, as on the CPU: products
  // in blocks of `invariant_rows` rows by one algorithm (cuda/kernels/matmul.h
  // says what that rests on), attention split at fixed token counts.
  bool batch_invariant = false;
  int32_t invariant_rows = 128;
  // Attention to a view rotates its keys to where they stand, instead of the
  // queries into the view's frame: slower, and rounds once more.
  bool rotate_keys = false;
  // Passes of few rows are recorded once and queued as a whole.
  bool graphs = true;
  uint32_t page_tokens = 16;  // a power of two
  // Called with 0..1 while weights are copied; may be empty.
  std::function<void(double)> progress;
};

// Copies the weights to the device as bf16; KV is bf16, sums and the residual
// are fp32, matrix products and attention read bf16. Page addresses of row
// groups are of the device.
//
// A pass of few rows whose shape comes a second time is recorded as a CUDA
// graph and replayed as long as its shape stays: rows, logits, launches rounded
// up, sizes of the input; of T5, those of the decoder alone. Tokens are chosen
// on the device, with all of SamplingOptions and the CPU's draws (weights in
// units of 2^-40: a draw within such a rounding of the border between two
// tokens may fall on the other one). Logits come back for requests with
// log-probabilities only, whose answer has the digest of them all. A pass over
// states that still arrive (RowGroup::arrivals) waits on the host before each
// layer's attention, and is never recorded.
//
// Does not keep the file. InvalidArgument for models that the kernels
// cannot run and for kFast; NotFound without cuBLASLt.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(
    const ModelFile& file, const CudaBackendOptions& options);

}  // namespace promptcache::worker
