#include "inference_worker/engine/families/config_check.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

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
  if (c.residual == ResidualKind::kParallel && c.post_norms) {
    return Invalid("a parallel residual with norms after its parts");
  }
  if (!std::isfinite(c.attention_scale) || c.attention_scale < 0 ||
      !std::isfinite(c.embedding_scale)) {
    return Invalid("attention scale ", c.attention_scale, ", embedding scale ",
                   c.embedding_scale);
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
