#include <cstdint>

#include "tests/fuzz/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  promptcache::worker::FuzzTokenizer(std::as_bytes(std::span(data, size)));
  return 0;
}
