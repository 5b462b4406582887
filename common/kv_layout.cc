#include "common/kv_layout.h"

#include "absl/strings/str_cat.h"

namespace promptcache {

absl::Status KvLayout::Validate() const {
  const bool sane = num_layers >= 1 && num_layers <= 4096 &&
                    num_kv_heads >= 1 && num_kv_heads <= 4096 &&
                    head_dim >= 1 && head_dim <= 4096 && page_tokens >= 1 &&
                    page_tokens <= 1024 &&
                    (type == KvType::kBf16 || type == KvType::kFp16);
  if (sane) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("KV layout out of range: ", ToString()));
}

Digest KvLayout::Fingerprint() const {
  return Sha256()
      .Add("num_layers", num_layers)
      .Add("num_kv_heads", num_kv_heads)
      .Add("head_dim", head_dim)
      .Add("type", static_cast<uint64_t>(type))
      .Add("version", version)
      .Finish();
}

std::string KvLayout::ToString() const {
  return absl::StrCat("{num_layers ", num_layers, ", num_kv_heads ",
                      num_kv_heads, ", head_dim ", head_dim, ", page_tokens ",
                      page_tokens, ", type ",
                      type == KvType::kBf16   ? "bf16"
                      : type == KvType::kFp16 ? "fp16"
                                              : "?",
                      ", version ", version, "}");
}

}  // namespace promptcache
