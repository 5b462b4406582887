#pragma once

#include <string>

#include "absl/status/status.h"
#include "inference_worker/model/model_file.h"

namespace promptcache::worker {

// Writes an opened GGUF file of the architecture `llama` with a byte-level
// vocabulary as a Hugging Face folder: the weights as the engine computes with
// them (bf16), rows of q and k in the folder's order, and the same tokens,
// merges and chat template in the folder's files. `folder` must exist.
absl::Status WriteHfFolder(const ModelFile& model, const std::string& folder);

}  // namespace promptcache::worker
