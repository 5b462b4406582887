#include "inference_worker/cpu/kernels.h"
#include "inference_worker/engine/cpu_backend.h"
#include "tests/inference_worker/engine/test_backends.h"
#include "tests/support/status_matchers.h"

namespace promptcache::worker {

std::vector<std::string> TestBackends() { return cpu::Kernels::Runnable(); }

bool TestBackendsHave(uint32_t head_dim) { return head_dim % 16 == 0; }

std::vector<uint32_t> TestPageSizes() { return {1, 5, 64}; }

absl::StatusOr<std::unique_ptr<Backend>> MakeTestBackend(
    const ModelFile& file, const TestBackendOptions& options) {
  return CreateCpuBackend(file, {.num_threads = options.threads,
                                 .kernels = options.name,
                                 .numerics = options.numerics,
                                 .page_tokens = options.page_tokens});
}

std::unique_ptr<PrivatePages> Pool(const Backend& backend, uint64_t num_pages) {
  // A stride may be up to a cache line more than a page.
  const uint64_t page_bytes = backend.layout().page_bytes() + 64;
  auto pool = PrivatePages::Create(backend.layout(), num_pages * page_bytes);
  PC_EXPECT_OK(pool);
  return *std::move(pool);
}

}  // namespace promptcache::worker
