#include "tests/inference_worker/serving/hash_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "inference_worker/engine/sampler.h"

namespace promptcache::worker {
namespace {

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What an oracle's token may see: where it stands and its state.
struct Seen {
  int32_t position = 0;
  uint64_t state = 0;
};

uint64_t StateOf(int32_t token, int32_t position,
                 const std::vector<Seen>& seen) {
  uint64_t sum = HashSeen(0, 0);
  for (const Seen& s : seen) sum += HashSeen(position - s.position, s.state);
  return HashState(token, sum);
}

// Appends the tokens as one causal sequence.
void RunSequence(const std::vector<int32_t>& tokens, int32_t position,
                 std::vector<Seen>* seen) {
  for (int32_t token : tokens) {
    seen->push_back({position, StateOf(token, position, *seen)});
    ++position;
  }
}

// Local positions and states of a module's pieces, piece by piece.
using ModuleStates = std::vector<std::vector<Seen>>;

ModuleStates EncodeOracle(const pml::PlanModule& m,
                          const std::vector<ModuleStates>& before) {
  std::vector<Seen> seen;
  for (const pml::ContextItem& item : m.context) {
    if (item.module < 0) {
      RunSequence(item.tokens, item.offset, &seen);
      continue;
    }
    int32_t index = 0;
    for (const auto& piece : before[static_cast<size_t>(item.module)]) {
      for (const Seen& s : piece) {
        if (index >= item.first_token &&
            index < item.first_token + item.num_tokens) {
          seen.push_back({item.offset + s.position, s.state});
        }
        ++index;
      }
    }
  }
  std::vector<std::pair<int32_t, std::pair<bool, size_t>>> order;
  for (size_t i = 0; i < m.pieces.size(); ++i) {
    order.push_back({m.pieces[i].offset, {true, i}});
  }
  for (size_t i = 0; i < m.placeholders.size(); ++i) {
    order.push_back({m.placeholders[i].offset, {false, i}});
  }
  std::sort(order.begin(), order.end());
  ModuleStates states(m.pieces.size());
  for (const auto& [offset, what] : order) {
    const auto& [kept, index] = what;
    const size_t begin = seen.size();
    RunSequence(kept ? m.pieces[index].tokens : m.placeholders[index].tokens,
                offset, &seen);
    if (kept) {
      states[index].assign(seen.begin() + static_cast<std::ptrdiff_t>(begin),
                           seen.end());
    }
  }
  return states;
}

}  // namespace

uint64_t HashSeen(int32_t distance, uint64_t state) {
  return Mix(Mix(static_cast<uint64_t>(static_cast<uint32_t>(distance))) ^
             state);
}

uint64_t HashState(int32_t token, uint64_t sum_seen) {
  return Mix(static_cast<uint64_t>(static_cast<uint32_t>(token)) * 31 +
             sum_seen);
}

std::vector<float> HashLogits(uint64_t state, uint32_t vocab_size) {
  std::vector<float> logits(vocab_size);
  for (uint32_t i = 0; i < vocab_size; ++i) {
    logits[i] = static_cast<float>(Mix(state + i) % 1000003) / 100000.0f;
  }
  return logits;
}

uint64_t OracleState(const pml::Plan& plan, bool full_attention,
                     const std::vector<int32_t>& generated) {
  std::vector<Seen> seen;
  if (full_attention) {
    int32_t position = 0;
    for (const pml::PlanSpan& span : plan.spans) {
      RunSequence(span.tokens, position, &seen);
      position += span.num_tokens();
    }
    RunSequence(generated, position, &seen);
    return seen.back().state;
  }
  std::vector<ModuleStates> modules;
  for (const pml::PlanModule& m : plan.modules) {
    modules.push_back(EncodeOracle(m, modules));
  }
  for (size_t i = 0; i < plan.spans.size(); ++i) {
    const pml::PlanSpan& span = plan.spans[i];
    if (span.kind == pml::SpanKind::kFresh) {
      RunSequence(span.tokens, span.start, &seen);
      continue;
    }
    const auto& m = plan.modules[static_cast<size_t>(span.module)];
    const auto& states = modules[static_cast<size_t>(span.module)]
                                [static_cast<size_t>(span.piece)];
    const int32_t offset = m.pieces[static_cast<size_t>(span.piece)].offset;
    for (const Seen& s : states) {
      seen.push_back({span.start - offset + s.position, s.state});
    }
    if (i + 1 == plan.spans.size()) {
      const int32_t position = seen.back().position;
      seen.pop_back();
      RunSequence({span.tokens.back()}, position, &seen);
    }
  }
  RunSequence(generated, plan.next_position, &seen);
  return seen.back().state;
}

HashBackend::HashBackend(uint32_t page_tokens, uint32_t vocab_size)
    : vocab_size_(vocab_size) {
  layout_.num_layers = 1;
  layout_.num_kv_heads = 1;
  layout_.head_dim = 4;
  layout_.page_tokens = page_tokens;
}

uint64_t HashBackend::SumOf(const KvView& view, int32_t position) {
  uint64_t sum = 0;
  for (uint32_t t = 0; t < view.num_tokens; ++t) {
    const uint32_t slot = view.first_token + t;
    const std::byte* page = view.pages[slot / layout_.page_tokens];
    const size_t at =
        (slot % layout_.page_tokens) * layout_.token_stride_bytes();
    uint64_t state = 0;
    int64_t local = 0;
    std::memcpy(&state, page + layout_.key_offset_bytes(0) + at, 8);
    std::memcpy(&local, page + layout_.value_offset_bytes(0) + at, 8);
    const int32_t said = view.local_position + static_cast<int32_t>(t);
    if (local != said) ++faults_;
    sum += HashSeen(position - view.position_offset - said, state);
  }
  return sum;
}

absl::Status HashBackend::Forward(std::span<const RowGroup> groups,
                                  std::vector<float>* logits) {
  ++passes_;
  if (hook_) {
    if (absl::Status status = hook_(groups); !status.ok()) return status;
  }
  logits->clear();
  for (const RowGroup& group : groups) {
    const auto n = static_cast<uint32_t>(group.tokens.size());
    rows_ += n;
    for (uint32_t r = 0; r < n; ++r) {
      const int32_t position = group.position + static_cast<int32_t>(r);
      const uint32_t index = group.own.num_tokens - n + r;
      const int64_t local = group.own.local_position + int64_t{index};
      if (position - group.own.position_offset != local) ++faults_;
      uint64_t sum = HashSeen(0, 0);
      for (const KvView& view : group.visible) sum += SumOf(view, position);
      KvView own = group.own;
      own.num_tokens = index;
      sum += SumOf(own, position);
      const uint64_t state = HashState(group.tokens[r], sum);

      const uint32_t slot = group.own.first_token + index;
      const size_t page = slot / layout_.page_tokens;
      const size_t at =
          (slot % layout_.page_tokens) * layout_.token_stride_bytes();
      std::byte* out = group.own_write_pages[page];
      std::memcpy(out + layout_.key_offset_bytes(0) + at, &state, 8);
      std::memcpy(out + layout_.value_offset_bytes(0) + at, &local, 8);
      if (group.logits == LogitsWanted::kAll ||
          (group.logits == LogitsWanted::kLast && r + 1 == n)) {
        const std::vector<float> row = HashLogits(state, vocab_size_);
        if (group.choice != nullptr) {
          ++choices_;
          group.choice->token =
              Sampler(group.choice->options).Choose(row, *group.choice);
          continue;
        }
        logits->insert(logits->end(), row.begin(), row.end());
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
