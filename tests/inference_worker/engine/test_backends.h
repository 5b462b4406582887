#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/numerics.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// What the tests of the engine run on. Two implementations: all sets of CPU
// kernels, and the GPU, which tests of a build emulate; the same tests are
// linked with either.

// Names for MakeTestBackend, the fastest first.
std::vector<std::string> TestBackends();

// Whether all of them have attention over heads of that size.
bool TestBackendsHave(uint32_t head_dim);
// Tokens of a page that all of them can read: small, odd where that goes, and
// large.
std::vector<uint32_t> TestPageSizes();

struct TestBackendOptions {
  std::string name = "auto";  // the fastest
  uint32_t threads = 2;
  uint32_t page_tokens = 16;
  Numerics numerics = Numerics::kExact;
};
absl::StatusOr<std::unique_ptr<Backend>> MakeTestBackend(
    const ModelFile& file, const TestBackendOptions& options);

// Pages in the backend's memory.
std::unique_ptr<PrivatePages> Pool(const Backend& backend,
                                   uint64_t num_pages = 256);

}  // namespace promptcache::worker
