#include "inference_worker/engine/families/config_check.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

// A table of biases has an entry for each.
constexpr uint32_t kMaxRelativeDistance = 1 << 16;

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

absl::Status CheckDimensions(const ModelConfig& c) {
  if (c.num_layers == 0 || c.num_heads == 0 || c.num_kv_heads == 0 ||
      c.hidden_dim == 0 || c.ffn_dim == 0 || c.vocab_size == 0 ||
      c.context_length == 0) {
    return Invalid("model with a dimension of 0: layers ", c.num_layers,
                   ", heads ", c.num_heads, ", kv heads ", c.num_kv_heads,
                   ", hidden ", c.hidden_dim, ", ffn ", c.ffn_dim,
                   ", vocabulary ", c.vocab_size, ", context ",
                   c.context_length);
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    return Invalid(c.num_heads, " heads do not divide into ", c.num_kv_heads,
                   " kv heads");
  }
  if (c.head_dim == 0 || c.head_dim % 16 != 0 || c.head_dim > kMaxHeadDim) {
    return Invalid("head_dim ", c.head_dim,
                   " must be a multiple of 16, at most ", kMaxHeadDim);
  }
  return absl::OkStatus();
}

absl::Status CheckPositions(const ModelConfig& c) {
  if (c.positions == PositionKind::kRope &&
      (c.rope.dims == 0 || c.rope.dims % 2 != 0 || c.rope.dims > c.head_dim)) {
    return Invalid("RoPE over ", c.rope.dims, " elements of a head of ",
                   c.head_dim);
  }
  if (c.positions == PositionKind::kAlibi &&
      !(c.alibi_max_bias > 0 && std::isfinite(c.alibi_max_bias))) {
    return Invalid("ALiBi with a largest bias of ", c.alibi_max_bias);
  }
  if ((c.positions == PositionKind::kRelative) != c.is_encoder_decoder()) {
    return Invalid(
        "relative positions are an encoder-decoder's, which has no "
        "others: ",
        c.encoder_layers, " layers of an encoder");
  }
  if (c.is_encoder_decoder() &&
      (c.relative_buckets < 4 || c.relative_buckets % 2 != 0 ||
       c.relative_max_distance <= c.relative_buckets / 2 ||
       c.relative_max_distance > kMaxRelativeDistance)) {
    return Invalid(c.relative_buckets, " buckets for distances up to ",
                   c.relative_max_distance,
                   ": must be even, at least 4, and "
                   "less than twice that distance, which is at most ",
                   kMaxRelativeDistance);
  }
  if (!c.layer_windows.empty() && c.layer_windows.size() != c.num_layers) {
    return Invalid(c.layer_windows.size(), " windows for ", c.num_layers,
                   " layers");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckConfig(const ModelConfig& c) {
  PC_RETURN_IF_ERROR(CheckDimensions(c));
  PC_RETURN_IF_ERROR(CheckPositions(c));
  if (c.is_encoder_decoder() &&
      (c.norm != NormKind::kRms || c.residual != ResidualKind::kSequential ||
       c.qk_norm || c.post_norms || !c.layer_windows.empty())) {
    return Invalid("an encoder-decoder with other layers than T5's");
  }
  if (c.residual == ResidualKind::kParallel && c.post_norms) {
    return Invalid("a parallel residual with norms after its parts");
  }
  if (!std::isfinite(c.attention_scale) || c.attention_scale < 0 ||
      !std::isfinite(c.embedding_scale) || !std::isfinite(c.output_scale)) {
    return Invalid("attention scale ", c.attention_scale, ", embedding scale ",
                   c.embedding_scale, ", output scale ", c.output_scale);
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
