#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/pml/plan.h"
#include "inference_worker/engine/backend.h"

namespace promptcache::worker {

// A model whose "states" are hashes. The state of a token is a function of its
// id and of the multiset {(distance, state)} of every token that it sees, so
// whatever is seen too much, too little, at a wrong distance or from wrong
// bytes changes it and every state after it, exactly. How what is seen is cut
// into views does not change it: with equal visibility, plain attention gives
// the same hashes. A page's K holds the state, its V the local position, which
// is checked against the view's.
//
// Thread-compatible, like every Backend, but for the counters and the gate.
class HashBackend final : public Backend {
 public:
  explicit HashBackend(uint32_t page_tokens = 4, uint32_t vocab_size = 64);

  absl::Status Forward(std::span<const RowGroup> groups,
                       std::vector<float>* logits) override;
  const KvLayout& layout() const override { return layout_; }
  uint32_t vocab_size() const override { return vocab_size_; }
  uint32_t context_length() const override { return 4096; }
  const std::string& numerics() const override { return numerics_; }
  uint32_t num_threads() const override { return 1; }
  bool chooses_tokens() const override { return chooses_tokens_.load(); }

  // Called at the start of each pass with its number; may block or fail.
  void SetHook(std::function<absl::Status(std::span<const RowGroup>)> hook) {
    hook_ = std::move(hook);
  }
  // As a GPU would; the CPU's sampler does it.
  void SetChoosesTokens(bool chooses) { chooses_tokens_.store(chooses); }
  uint64_t choices() const { return choices_.load(); }
  uint64_t passes() const { return passes_.load(); }
  uint64_t rows() const { return rows_.load(); }
  // Views that named bytes of another local position than they said.
  uint64_t faults() const { return faults_.load(); }

 private:
  uint64_t SumOf(const KvView& view, int32_t position);

  KvLayout layout_;
  const uint32_t vocab_size_;
  const std::string numerics_ = "hash";
  std::function<absl::Status(std::span<const RowGroup>)> hook_;
  std::atomic<bool> chooses_tokens_{false};
  std::atomic<uint64_t> choices_{0};
  std::atomic<uint64_t> passes_{0};
  std::atomic<uint64_t> rows_{0};
  std::atomic<uint64_t> faults_{0};
};

// The building blocks, for oracles.
uint64_t HashSeen(int32_t distance, uint64_t state);
uint64_t HashState(int32_t token, uint64_t sum_seen);
// Logits of a token with that state.
std::vector<float> HashLogits(uint64_t state, uint32_t vocab_size);

// Straight from the definitions of pml::Plan, without views or pages: the
// state of the plan's last token, and of generated tokens after it when given.
uint64_t OracleState(const pml::Plan& plan, bool full_attention,
                     const std::vector<int32_t>& generated = {});

}  // namespace promptcache::worker
