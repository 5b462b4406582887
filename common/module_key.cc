#include "common/module_key.h"

#include <cstring>
#include <optional>
#include <span>

#include "glog/logging.h"

namespace promptcache {
namespace {

constexpr uint64_t kKeyFormatVersion = 1;

uint64_t Head(const Digest& d) {
  uint64_t head;
  std::memcpy(&head, d.bytes.data(), sizeof(head));
  return head;
}

uint64_t Signed(int64_t v) { return static_cast<uint64_t>(v); }

// The context keys of a plan's modules, one after the other. What a list has in
// common with the one before is hashed once: of a prefix chain every item, not
// every pair.
class ContextKeys {
 public:
  // Nothing seen: 32 zero bytes.
  Digest Next(const pml::ContextList& context,
              const std::vector<ModuleIdentity>& before) {
    if (context.empty()) return Digest{};
    if (context.begin() != begin_ || context.size() < hashed_) {
      begin_ = context.begin();
      hashed_ = 0;
      sha_.emplace();
    }
    for (; hashed_ < context.size(); ++hashed_) Add(context[hashed_], before);
    return sha_->Snapshot();
  }

 private:
  void Add(const pml::ContextItem& item,
           const std::vector<ModuleIdentity>& before) {
    if (item.module < 0) {
      sha_->Add("text", std::span<const int32_t>(item.tokens))
          .Add("offset", Signed(item.offset));
      return;
    }
    CHECK_LT(static_cast<size_t>(item.module), before.size());
    sha_->Add("module", before[static_cast<size_t>(item.module)].key)
        .Add("first_token", Signed(item.first_token))
        .Add("num_tokens", Signed(item.num_tokens))
        .Add("offset", Signed(item.offset));
  }

  std::optional<Sha256> sha_;  // of the first `hashed_` items at `begin_`
  const pml::ContextItem* begin_ = nullptr;
  size_t hashed_ = 0;
};

Digest PiecesDigest(const pml::PlanModule& module) {
  Sha256 sha;
  for (const pml::Piece& piece : module.pieces) {
    sha.Add("piece", Signed(piece.offset))
        .Add("tokens", std::span<const int32_t>(piece.tokens));
  }
  // Own params' slots: what stood in them is seen by the pieces after.
  for (const pml::Piece& slot : module.placeholders) {
    sha.Add("slot", Signed(slot.offset))
        .Add("scaffold", std::span<const int32_t>(slot.tokens));
  }
  return sha.Finish();
}

}  // namespace

std::vector<ModuleIdentity> ModuleIdentities(const pml::Plan& plan,
                                             const IdentityBase& base) {
  const Digest layout = base.layout.Fingerprint();
  const Digest domain = Sha256Of(base.isolation_domain);
  std::vector<ModuleIdentity> out;
  out.reserve(plan.modules.size());
  ContextKeys context_keys;
  for (const pml::PlanModule& module : plan.modules) {
    ModuleIdentity id;
    id.context_key = context_keys.Next(module.context, out);
    const Digest pieces = PiecesDigest(module);
    const uint64_t start =
        base.absolute_positions ? Signed(module.schema_start) : 0;
    id.key = Sha256()
                 .Add("key_format_version", kKeyFormatVersion)
                 .Add("model", base.model_fingerprint)
                 .Add("tokenizer", base.tokenizer_digest)
                 .Add("layout", layout)
                 .Add("isolation_domain", domain)
                 .Add("context", id.context_key)
                 .Add("pieces", pieces)
                 .Add("start", start)
                 .Finish();
    id.parts = {Head(base.model_fingerprint),
                Head(base.tokenizer_digest),
                Head(layout),
                Head(domain),
                Head(id.context_key),
                Head(pieces),
                start};
    out.push_back(id);
  }
  return out;
}

}  // namespace promptcache
