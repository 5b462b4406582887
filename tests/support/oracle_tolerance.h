#pragma once

namespace promptcache::worker {

// What numerics=exact may differ by from the oracles (reference_model.h,
// reference_t5.h): root mean square of the differences of a row's logits over
// that of the logits themselves, centred where log-probabilities are compared.
// Seen on small random models: up to 0.0078 with fp32 activations, 0.0164 with
// bf16 ones (amx, avx512bf16).
inline constexpr double kOracleTolerance = 0.02;

}  // namespace promptcache::worker
