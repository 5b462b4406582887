#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/digest.h"
#include "common/tokenizer.h"

namespace promptcache {

// A tokenizer simple enough that tests can count its tokens by eye: one token
// a byte, but a space joins the lower-case letter after it ("a b" is "a",
// " b"), as real ones join words. Control tokens: <|bos|> 0, <|im_start|> 1,
// <|im_end|> 2. Immutable, thread-safe.
class FakeTokenizer final : public Tokenizer {
 public:
  struct Options {
    bool adds_bos = false;
  };
  FakeTokenizer() : FakeTokenizer(Options()) {}
  explicit FakeTokenizer(const Options& options);

  std::vector<int32_t> Encode(std::string_view text) const override;
  std::string Decode(int32_t id) const override;
  int32_t ControlToken(std::string_view text) const override;
  int32_t bos_id() const override { return bos_id_; }
  int32_t vocab_size() const override;
  const std::vector<int32_t>& stop_ids() const override { return stop_ids_; }
  const Digest& digest() const override { return digest_; }

  // Everything decoded; control tokens by their text.
  std::string Text(const std::vector<int32_t>& ids) const;

 private:
  const int32_t bos_id_;
  const std::vector<int32_t> stop_ids_;
  const Digest digest_;
};

}  // namespace promptcache
