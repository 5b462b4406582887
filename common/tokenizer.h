#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/digest.h"

namespace promptcache {

// Text to token ids and back. Implementations are immutable and thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The ids of `text`, taken literally: nothing in it becomes a control token,
  // no BOS or EOS is added. Invalid UTF-8: each maximal invalid part counts as
  // one U+FFFD. Never quadratic in the length of the text.
  virtual std::vector<int32_t> Encode(std::string_view text) const = 0;

  // The bytes that one id stands for; may end in the middle of a character.
  // Control tokens and ids out of range give "".
  virtual std::string Decode(int32_t id) const = 0;

  // The id of a control token by its exact text ("<|im_start|>"), or -1.
  virtual int32_t ControlToken(std::string_view text) const = 0;

  // Prepended to every plan by the preamble, or -1 when the model adds none.
  virtual int32_t bos_id() const = 0;
  // What ends a text that an encoder reads (T5's "</s>"), or -1: nothing does.
  virtual int32_t text_end_id() const { return -1; }
  virtual int32_t vocab_size() const = 0;
  // Ids that end a generation (end of turn, end of text).
  virtual const std::vector<int32_t>& stop_ids() const = 0;
  // Over everything that the ids depend on; part of every module key.
  virtual const Digest& digest() const = 0;
};

}  // namespace promptcache
