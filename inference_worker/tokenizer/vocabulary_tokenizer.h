#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tokenizer.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_merger.h"
#include "inference_worker/tokenizer/literal_tokens.h"

namespace promptcache::worker {

// GGUF's numbers.
enum class TokenKind : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// What all tokenizers have in common: everything but Encode. Immutable and
// thread-safe once created.
class VocabularyTokenizer : public Tokenizer {
 public:
  std::string Decode(int32_t id) const final;
  int32_t ControlToken(std::string_view text) const final;
  int32_t bos_id() const final { return bos_id_; }
  int32_t text_end_id() const final { return text_end_id_; }
  int32_t vocab_size() const final {
    return static_cast<int32_t>(decoded_.size());
  }
  const std::vector<int32_t>& stop_ids() const final { return stop_ids_; }
  const Digest& digest() const final { return digest_; }

 protected:
  using IdsBySpelling = absl::flat_hash_map<absl::string_view, int32_t>;

  // Calls `visit` for each token that text can become, in order; it returns
  // the bytes that the token stands for. Control and unknown tokens are dealt
  // with here. InvalidArgument for a vocabulary that is none.
  absl::Status ReadVocabulary(
      const VocabularyData& vocabulary,
      absl::FunctionRef<std::string(const std::string& token, int32_t id,
                                    TokenKind kind)>
          visit);
  // The merges of byte-pair encoding, each "left right", split at the space
  // that is neither first nor in a spelling, as rules in their order.
  // InvalidArgument, with the merge, where `ids` lacks a half or the whole.
  static absl::Status ReadMerges(const VocabularyData& vocabulary,
                                 const IdsBySpelling& ids, BpeMerger* merger);

  const std::string& decoded(int32_t id) const {
    return decoded_[static_cast<size_t>(id)];
  }
  // The first token of the kind kUnknown, or -1.
  int32_t unknown_id() const { return unknown_id_; }

 private:
  void ReadStopIds(const VocabularyData& vocabulary);

  std::vector<std::string> decoded_;  // by id
  absl::flat_hash_map<std::string, int32_t> control_tokens_;
  int32_t unknown_id_ = -1;
  int32_t bos_id_ = -1;
  int32_t text_end_id_ = -1;
  std::vector<int32_t> stop_ids_;
  Digest digest_;
};

// The value of "<0x1F>", or -1.
int ByteOfToken(std::string_view token);

}  // namespace promptcache::worker
