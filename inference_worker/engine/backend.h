#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/kv_layout.h"
#include "common/kv_view.h"
#include "inference_worker/engine/arrival.h"

namespace promptcache::worker {

enum class LogitsWanted { kNone, kLast, kAll };

struct TokenChoice;  // sampler.h

// What rows of an encoder-decoder model are; other models have kDecoder only.
enum class RowPart {
  kDecoder,
  // The first, or further, tokens of a segment: tokens that the encoder sees
  // together, each all of them. Groups of a segment follow each other in one
  // pass and are never cut.
  kEncoder,
  kEncoderContinued,
};

// Rows of one pass that belong together: consecutive tokens at consecutive
// positions of one piece of a module or of one fresh span. Spans point into the
// caller's memory and must outlive the call of Forward.
//
// Of an encoder-decoder, `visible` is what the decoder's attention to the
// encoder reads, `own` the decoder's own tokens, at positions from 0. Encoder
// rows see nothing but their segment: `visible` is empty, `own` is where the
// keys and values go that the decoder will read, in full and from its first
// token on, and positions are told by their differences within the segment.
struct RowGroup {
  std::span<const int32_t> tokens;
  // Position of tokens[0]. For a fresh span of a plan: its plan position; for a
  // module being encoded: its local position. Only differences to views'
  // offsets matter. Always own.position_offset + own.local_position +
  // own.num_tokens - tokens.size(): Forward refuses another.
  int32_t position = 0;
  // What every row sees in full, in plan order. Views may lie in pages that
  // other groups of the same pass write: in each layer all keys and values are
  // written before any attention reads.
  std::span<const KvView> visible;
  // The piece's or span's own KV from its first token on, these rows being its
  // last: row r sees its first own.num_tokens - tokens.size() + r + 1 tokens.
  KvView own;
  // Writable addresses of own.pages, parallel to it (the same addresses for
  // private pages, the writable alias for a reservation's).
  std::byte* const* own_write_pages = nullptr;
  LogitsWanted logits = LogitsWanted::kNone;
  // With kLast, of a backend that chooses_tokens(): the token that follows is
  // chosen where the logits are and written into choice->token; they do not
  // come back. Null: they do.
  TokenChoice* choice = nullptr;
  // Learned positions only: what makes `position` one of the schema's layout,
  // which is what a table of embeddings knows. PlanModule::schema_start for the
  // rows of a module being encoded, else 0.
  int32_t embedding_position_offset = 0;
  RowPart part = RowPart::kDecoder;
  // What views of `visible` may still be waiting for; on a GPU only. A layer's
  // attention waits for its states, the layers before it are computed
  // meanwhile. Forward fails for nobody whose states never come: such rows'
  // results are to be thrown away (Arrival::AwaitVerified).
  std::span<Arrival* const> arrivals;
};

// Tokens whose keys and values the attention of a pass needed, if every group
// had been alone, and those that it read: what several groups with few rows see
// is read once for all of them. An average over the layers.
struct AttentionReads {
  uint64_t needed_tokens = 0;
  uint64_t read_tokens = 0;
};

// A loaded model on a device. Forward is not reentrant: one pass at a time
// (runs on the scheduler's thread).
//
// What a row gives depends only on its token, its position relative to what it
// sees, and the bytes of what it sees: never on the other rows of the pass, on
// where pages lie, on how a span was split into passes, or on the number of
// threads. Bit for bit on the CPU; on a GPU as an option (cuda_backend.h).
class Backend {
 public:
  virtual ~Backend() = default;

  // One ragged pass over all groups. On success `logits` holds
  // [number of rows that asked for them][vocab_size], in the order of groups
  // and rows, without the rows that have a choice, whose tokens are written.
  // InvalidArgument, before anything is written, for a token id, position or
  // view out of range, and for a choice where none is made.
  virtual absl::Status Forward(std::span<const RowGroup> groups,
                               std::vector<float>* logits) = 0;

  // Of the last pass. Zeros where nobody counts: on a GPU, and of
  // encoder-decoders.
  virtual AttentionReads attention_reads() const { return {}; }

  virtual const KvLayout& layout() const = 0;
  virtual uint32_t vocab_size() const = 0;
  virtual uint32_t context_length() const = 0;
  // Names what results depend on besides the model: "exact/avx512bf16". Part
  // of the model fingerprint of module keys.
  virtual const std::string& numerics() const = 0;
  virtual uint32_t num_threads() const = 0;
  // Whether row groups may have a choice: worth it where logits are far away.
  // What is chosen is what Sampler would choose from the logits, but for a
  // draw within a rounding of the border between two tokens.
  virtual bool chooses_tokens() const { return false; }

  // Encoder-decoder models: the token that the decoder begins with. None: a
  // decoder without an encoder.
  virtual std::optional<int32_t> decoder_start() const { return std::nullopt; }
  // The encoder's output [hidden] for the last of `tokens`, a segment; for
  // checks against published values. Unimplemented without an encoder.
  virtual absl::Status EncoderOutput(std::span<const int32_t>,
                                     std::vector<float>*) {
    return absl::UnimplementedError("the model has no encoder");
  }
};

}  // namespace promptcache::worker
