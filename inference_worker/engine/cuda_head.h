#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/kernels/sampling.h"
#include "cuda/runtime/device.h"
#include "inference_worker/engine/cuda_layers.h"
#include "inference_worker/engine/cuda_readback.h"
#include "inference_worker/engine/cuda_weights.h"
#include "inference_worker/engine/pass_input.h"
#include "inference_worker/engine/sampler.h"

namespace promptcache::worker {

// The end of a pass: norm and projection onto the vocabulary of the rows that
// want it, and what comes back of each: its logits, or the token that was
// chosen from them on the device.
//
// In this order for each pass: Clear, Add for every row, AddTo the input,
// Reserve; the input's upload; then RunAndRead, or Run, which can be recorded,
// and Read. Thread-compatible. Must not outlive the layers nor the weights.
class CudaHead {
 public:
  CudaHead(CudaLayers& layers, const CudaWeights& weights, uint32_t vocab_size);

  void Clear();
  // `row` of the pass wants its logits; with a choice, which must outlive the
  // pass, only the token that it comes to.
  void Add(int32_t row, TokenChoice* choice);
  int32_t num_rows() const {
    return static_cast<int32_t>(rows_.size() + choices_.size());
  }
  // Rows whose logits come back.
  int32_t num_returned() const { return static_cast<int32_t>(rows_.size()); }

  void AddTo(PassInput& input);
  // Room for what is chosen; true when it moved.
  absl::StatusOr<bool> Reserve();

  // Queues all rows and waits for nothing. REQUIRES: num_rows() is at most
  // CudaLayers::kLogitRows.
  absl::Status Run(const PassInput& input) {
    return RunBlock(input, 0, num_rows());
  }
  // Waits for what Run queued: `logits` [num_returned()][vocab], in the order
  // of Add, and the choices' tokens.
  absl::Status Read(float* logits);
  // Any number of rows. Waits.
  absl::Status RunAndRead(const PassInput& input, float* logits);

 private:
  // Of [first, first + num_rows), rows that are returned come first.
  absl::Status RunBlock(const PassInput& input, int32_t first,
                        int32_t num_rows);
  absl::Status ReadBlock(int32_t first, int32_t num_rows, float* logits);

  CudaLayers& layers_;
  const CudaWeights& weights_;
  const int32_t vocab_;

  std::vector<int32_t> rows_;         // of the pass; whose logits come back
  std::vector<int32_t> choice_rows_;  // whose tokens come back
  std::vector<TokenChoice*> choices_;
  std::vector<gpu::SamplingRow> sampling_rows_;
  std::vector<int32_t> penalized_;
  std::vector<int32_t> tokens_;
  size_t rows_at_ = 0;  // in the input: rows_, then choice_rows_
  size_t sampling_rows_at_ = 0;
  size_t penalized_at_ = 0;
  gpu::DeviceBuffer chosen_;  // int32 [choices]
  CudaReadback readback_;
};

}  // namespace promptcache::worker
