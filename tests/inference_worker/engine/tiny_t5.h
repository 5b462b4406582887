#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/private_span.h"
#include "inference_worker/model/model_file.h"
#include "tests/support/gguf_writer.h"

namespace promptcache::worker {

// tests/data/models/later/tiny-t5: T5 1.0.
std::unique_ptr<ModelFile> TinyT5();

// A model of the shape of T5 1.1 made of its values: a gated feed-forward, an
// output matrix of its own, three heads (less than the hidden dimension has
// room for), one layer in the decoder and two in the encoder. The weights stay
// mapped.
std::unique_ptr<ModelFile> TinyGatedT5();

// A model of this kind as converters of GGUF files write it.
GgufWriter GgufOfT5(const ModelFile& model);

// Encodes a segment, in a pass of its own.
absl::Status EncodeSegment(Backend& backend, std::span<const int32_t> ids,
                           PrivateSpan& span);

}  // namespace promptcache::worker
