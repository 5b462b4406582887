#pragma once

#include "absl/status/statusor.h"
#include "inference_worker/model/gguf.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// The tokenizer's part of the metadata. Lists have one entry for each token or
// are empty, ids are -1 or in range. A file without a tokenizer gives an empty
// one.
absl::StatusOr<VocabularyData> ReadGgufVocabulary(const GgufFile& file);

}  // namespace promptcache::worker
