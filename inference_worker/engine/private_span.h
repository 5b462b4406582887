#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/private_pages.h"

namespace promptcache::worker {

// Consecutive tokens from position `start`, their KV in private pages that
// grow with them: a fresh span with what is generated after it, or a module
// that is computed without the cache. Thread-compatible.
// Must not outlive the pool, nor move while a RowGroup of it is in use.
class PrivateSpan {
 public:
  PrivateSpan(PrivatePages& pool, int32_t start)
      : pool_(&pool), start_(start) {}
  ~PrivateSpan() { Reset(); }
  PrivateSpan(PrivateSpan&& other) noexcept;
  PrivateSpan& operator=(PrivateSpan&&) = delete;

  // Rows for `tokens`, as the span's next ones; counts them as there, so the
  // pass is to be run before anything else. `tokens` and `visible` must
  // outlive the pass. ResourceExhausted: no pages, nothing has changed.
  absl::StatusOr<RowGroup> Append(std::span<const int32_t> tokens,
                                  std::span<const KvView> visible,
                                  LogitsWanted logits);

  // Append and a pass of it alone.
  absl::Status Run(Backend& backend, std::span<const int32_t> tokens,
                   std::span<const KvView> visible, LogitsWanted wanted,
                   std::vector<float>* logits);

  // All tokens so far, as seen when the first one stands at `start`; valid
  // until the next Append.
  KvView PlacedAt(int32_t start) const;

  uint32_t num_tokens() const { return num_tokens_; }
  int32_t next_position() const {
    return start_ + static_cast<int32_t>(num_tokens_);
  }
  // Gives the pages back.
  void Reset();

 private:
  PrivatePages* const pool_;
  const int32_t start_;
  uint32_t num_tokens_ = 0;
  std::vector<std::byte*> pages_;
};

}  // namespace promptcache::worker
