#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/cpu/kernels.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

struct CpuLayerWeights {
  std::vector<float> attention_norm;  // [hidden]
  cpu::PackedMatrix qkv;              // [q + k + v, hidden]
  cpu::PackedMatrix attention_out;    // [hidden, q]
  std::vector<float> ffn_norm;        // [hidden]
  cpu::PackedMatrix gate_up;          // [2 * ffn, hidden]: gate, then up
  cpu::PackedMatrix down;             // [hidden, ffn]
};

// A llama's weights as bf16 panels for one set of kernels; norms in fp32.
struct CpuWeights {
  cpu::PackedMatrix embedding;  // [vocab, hidden]
  cpu::PackedMatrix output;     // [vocab, hidden]; empty when tied
  std::vector<float> output_norm;
  std::vector<CpuLayerWeights> layers;

  const cpu::PackedMatrix& head() const {
    return output.num_rows() > 0 ? output : embedding;
  }
};

// Dequantises, rounds to bf16 and packs everything, on all threads of
// `kernels`. `progress` (may be empty) is called on this thread with 0..1.
// InvalidArgument names a tensor whose shape is not what the config says.
absl::StatusOr<CpuWeights> LoadCpuWeights(
    const ModelFile& file, cpu::Kernels& kernels,
    const std::function<void(double)>& progress);

}  // namespace promptcache::worker
