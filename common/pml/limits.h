#pragma once

#include <cstdint>

namespace promptcache::pml {

// What a document may measure. Over one: PML_LIMIT, which names the limit and
// says both numbers. They bound the work and the memory that a request costs.
struct Limits {
  int64_t schema_bytes = int64_t{4} << 20;
  int64_t prompt_bytes = int64_t{1} << 20;
  // Elements inside one another, the document's own not counted.
  int64_t depth = 32;
  int64_t modules = 2000;  // of a schema
  int64_t name_chars = 128;
};

}  // namespace promptcache::pml
