#include <utility>

#include "cuda/kernels/attention.h"
#include "cuda/runtime/gpus.h"
#include "glog/logging.h"
#include "inference_worker/engine/cuda_backend.h"
#include "inference_worker/engine/kv_memory.h"
#include "tests/inference_worker/engine/test_backends.h"
#include "tests/inference_worker/engine/test_gpu.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

gpu::Device* TestGpu() {
  static gpu::Device* const device = [] {
    auto opened = gpu::OpenGpu(gpu::FindGpus(), "");
    CHECK(opened.ok()) << opened.status();
    return opened->release();  // for the life of the process
  }();
  return device;
}

std::vector<std::string> TestBackends() { return {"cuda"}; }

bool TestBackendsHave(uint32_t head_dim) { return gpu::HasAttention(head_dim); }

std::vector<uint32_t> TestPageSizes() { return {1, 8, 64}; }

// Batch-invariant, so that the tests' equalities hold here, too; blocks of few
// rows, since an emulated product costs what its padding says.
absl::StatusOr<std::unique_ptr<Backend>> MakeTestBackend(
    const ModelFile& file, const TestBackendOptions& options) {
  return CreateCudaBackend(file, {.device = TestGpu(),
                                  .numerics = options.numerics,
                                  .batch_invariant = true,
                                  .invariant_rows = 16,
                                  .page_tokens = options.page_tokens});
}

std::unique_ptr<PrivatePages> Pool(const Backend& backend, uint64_t num_pages) {
  static KvMemory* const memory =
      KvMemory::Create({.device = TestGpu(), .sum_pages = {}})->release();
  const uint64_t page_bytes = backend.layout().page_bytes() + 64;
  auto pool =
      PrivatePages::Create(backend.layout(), num_pages * page_bytes, memory);
  PC_EXPECT_OK(pool);
  return *std::move(pool);
}

}  // namespace promptcache::worker
