#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/model/model_file.h"
#include "tests/inference_worker/engine/test_backends.h"
#include "tests/support/gguf_writer.h"

namespace promptcache::worker {

// Sizes that are no multiple of a kernel's tile; several query heads to a key
// head.
inline TinyLlamaSpec OddSpec() {
  return {.layers = 3,
          .heads = 6,
          .kv_heads = 2,
          .head_dim = 32,
          .hidden = 96,
          .ffn = 160,
          .vocab = 333,
          .context = 4096};
}

// The same with matrices of 4 and 8 bits.
inline TinyLlamaSpec QuantizedSpec() {
  TinyLlamaSpec spec = OddSpec();
  spec.type = TensorType::kQ4_1;
  spec.embedding_type = TensorType::kQ8_0;
  return spec;
}

// Written, opened, and the file removed: weights stay mapped.
std::unique_ptr<ModelFile> TinyModelFile(const TinyLlamaSpec& spec = OddSpec());

struct TinyBackendOptions {
  TinyLlamaSpec spec = OddSpec();
  std::string kernels = "auto";
  uint32_t threads = 2;
  uint32_t page_tokens = 16;
  Numerics numerics = Numerics::kExact;
};
std::unique_ptr<Backend> TinyBackend(const TinyBackendOptions& options = {});

// Random ids, a function of the seed.
std::vector<int32_t> RandomIds(size_t count, uint32_t seed,
                               uint32_t vocab = 333);

// Rows of logits that are bit for bit the same.
bool SameBits(std::span<const float> a, std::span<const float> b);

}  // namespace promptcache::worker
