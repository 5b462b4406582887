#include "tools/cli/cache_capacity.h"

#include "absl/strings/str_cat.h"
#include "common/byte_size.h"
#include "tools/cli/cli_status.h"

namespace promptcache::cli {
namespace {

constexpr uint64_t kSegmentBytes = uint64_t{64} << 20;  // --segment_bytes
constexpr uint64_t kSystemPageBytes = 4096;

}  // namespace

absl::StatusOr<uint64_t> CapacityTokens(const KvLayout& layout,
                                        uint64_t memory_bytes) {
  const uint64_t page_bytes = layout.page_bytes();
  const uint64_t whole = memory_bytes - memory_bytes % kSystemPageBytes;
  const uint64_t pages = whole / kSegmentBytes * (kSegmentBytes / page_bytes) +
                         whole % kSegmentBytes / page_bytes;
  if (pages == 0) {
    const uint64_t least = (page_bytes + kSystemPageBytes - 1) /
                           kSystemPageBytes * kSystemPageBytes;
    return UsageError(absl::StrCat(
        "--memory: ", FormatByteSize(memory_bytes),
        " holds nothing of this model: the smallest piece, ",
        layout.page_tokens, " tokens, takes ", FormatByteSize(least)));
  }
  return pages * layout.page_tokens;
}

}  // namespace promptcache::cli
