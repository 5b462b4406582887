#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/tokenizer.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// One per `VocabularyData::model`; CreateTokenizer chooses.

// "gpt2": byte-level BPE.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateBpeTokenizer(
    const VocabularyData& vocabulary);

// "llama": SentencePiece's BPE. Spaces become U+2581, with one in front of the
// text unless the vocabulary says otherwise; characters merge by the score of
// what they become (or by `merges`, where the vocabulary has them); what is no
// token is spelled by byte tokens, or is the unknown token where there are
// none.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceTokenizer(
    const VocabularyData& vocabulary);

// "t5": SentencePiece's Unigram: of all ways to cut the text into pieces the
// one with the highest sum of scores, after the vocabulary's own normalisation.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateUnigramTokenizer(
    const VocabularyData& vocabulary);

}  // namespace promptcache::worker
