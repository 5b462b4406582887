#include "inference_worker/engine/private_span.h"

#include <utility>

#include "common/status_macros.h"

namespace promptcache::worker {

PrivateSpan::PrivateSpan(PrivateSpan&& other) noexcept
    : pool_(other.pool_),
      start_(other.start_),
      num_tokens_(std::exchange(other.num_tokens_, 0)),
      pages_(std::exchange(other.pages_, {})) {}

absl::StatusOr<RowGroup> PrivateSpan::Append(std::span<const int32_t> tokens,
                                             std::span<const KvView> visible,
                                             LogitsWanted logits) {
  const uint64_t total = num_tokens_ + tokens.size();
  const uint64_t needed = pool_->layout().PagesFor(total);
  if (needed > pages_.size()) {
    PC_ASSIGN_OR_RETURN(const std::vector<std::byte*> more,
                        pool_->Allocate(needed - pages_.size()));
    pages_.insert(pages_.end(), more.begin(), more.end());
  }
  const int32_t position = next_position();
  num_tokens_ = static_cast<uint32_t>(total);
  return RowGroup{.tokens = tokens,
                  .position = position,
                  .visible = visible,
                  .own = PlacedAt(start_),
                  .own_write_pages = pages_.data(),
                  .logits = logits};
}

absl::Status PrivateSpan::Run(Backend& backend, std::span<const int32_t> tokens,
                              std::span<const KvView> visible,
                              LogitsWanted wanted, std::vector<float>* logits) {
  const uint32_t before = num_tokens_;
  PC_ASSIGN_OR_RETURN(const RowGroup group, Append(tokens, visible, wanted));
  const absl::Status status = backend.Forward({&group, 1}, logits);
  if (!status.ok()) num_tokens_ = before;
  return status;
}

KvView PrivateSpan::PlacedAt(int32_t start) const {
  return {.pages = pages_.data(),
          .num_tokens = num_tokens_,
          .position_offset = start};
}

void PrivateSpan::Reset() {
  pool_->Free(pages_);
  pages_.clear();
  num_tokens_ = 0;
}

}  // namespace promptcache::worker
