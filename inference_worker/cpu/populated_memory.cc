#include "inference_worker/cpu/populated_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/available_memory.h"
#include "common/status_macros.h"

namespace promptcache::worker::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

absl::StatusOr<PopulatedMemory> PopulatedMemory::Allocate(
    size_t num_bytes, std::optional<uint64_t> available_bytes) {
  PopulatedMemory memory;
  if (num_bytes == 0) return memory;
  // Populating more than there is does not fail, it has somebody killed. What
  // is small is not worth the look.
  if (num_bytes >= kHugePage) {
    PC_RETURN_IF_ERROR(
        CheckMemory("memory to compute with", num_bytes,
                    available_bytes.value_or(AvailableMemoryBytes())));
  }
  // Mapped first, advised, then populated: MAP_POPULATE would fault small
  // pages in before the advice is given.
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mmap of ", num_bytes, " bytes: ", strerror(errno)));
  }
  memory.data_ = static_cast<std::byte*>(data);
  memory.num_bytes_ = num_bytes;
  // Both are advice: without them the pages come one fault at a time.
  if (num_bytes >= kHugePage) madvise(data, num_bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, num_bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
    return absl::ResourceExhaustedError(
        absl::StrCat("populating ", num_bytes, " bytes: ", strerror(errno)));
  }
#endif
  return memory;
}

PopulatedMemory& PopulatedMemory::operator=(PopulatedMemory&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  data_ = std::exchange(other.data_, nullptr);
  num_bytes_ = std::exchange(other.num_bytes_, 0);
  return *this;
}

void PopulatedMemory::Reset() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
  data_ = nullptr;
  num_bytes_ = 0;
}

}  // namespace promptcache::worker::cpu
