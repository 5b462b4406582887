#include "inference_worker/engine/self_check.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/private_span.h"

namespace promptcache::worker {
namespace {

// Seen, on models of every family: up to 0.0113 (Gemma's sliding layers, bf16
// activations). A module a few places off gives 0.1 and more.
constexpr double kTolerance = 0.04;
// Of numerics=fast, where a last bit can choose another 8-bit code: up to 0.045
// seen (Gemma 3, moved; 0.013 on SmolLM2).
constexpr double kFastTolerance = 0.1;

constexpr uint32_t kModuleTokens = 48;
constexpr uint32_t kFreshTokens = 16;
constexpr int32_t kOffset = 500;

// Anything but a repetition will do; the same on every machine.
std::vector<int32_t> BuiltInTokens(size_t count, uint32_t vocab_size) {
  std::vector<int32_t> tokens(count);
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (int32_t& token : tokens) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    token = static_cast<int32_t>((state >> 33) % vocab_size);
  }
  return tokens;
}

double RelativeError(std::span<const float> logits,
                     std::span<const float> expected) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = double{logits[i]} - double{expected[i]};
    error += difference * difference;
    size += double{expected[i]} * double{expected[i]};
  }
  return std::sqrt(error / size);
}

// Two segments and a decoder that sees both.
class EncoderDecoderCheck {
 public:
  EncoderDecoderCheck(Backend& backend, PrivatePages& pages)
      : backend_(backend),
        pages_(pages),
        tokens_(BuiltInTokens(kModuleTokens + 2 * kFreshTokens,
                              backend.vocab_size())),
        decoder_ids_(tokens_.end() - kFreshTokens, tokens_.end()) {
    decoder_ids_.front() = *backend.decoder_start();
  }

  absl::StatusOr<ReuseErrors> Run() {
    PC_ASSIGN_OR_RETURN(const std::vector<float> together, InOnePass());
    PrivateSpan module(pages_, 0);
    PrivateSpan fresh(pages_, kModuleTokens);
    PC_ASSIGN_OR_RETURN(RowGroup group, Encode(Module(), module));
    PC_RETURN_IF_ERROR(backend_.Forward({&group, 1}, &ignored_));
    PC_ASSIGN_OR_RETURN(group, Encode(Fresh(), fresh));
    PC_RETURN_IF_ERROR(backend_.Forward({&group, 1}, &ignored_));
    const KvView in_place[] = {module.PlacedAt(0),
                               fresh.PlacedAt(kModuleTokens)};
    const KvView moved[] = {fresh.PlacedAt(0), module.PlacedAt(kOffset)};
    PC_ASSIGN_OR_RETURN(const std::vector<float> apart, Decode(in_place));
    PC_ASSIGN_OR_RETURN(const std::vector<float> elsewhere, Decode(moved));
    return ReuseErrors{.in_place = RelativeError(apart, together),
                       .moved = RelativeError(elsewhere, apart),
                       .tolerance = kTolerance};
  }

 private:
  std::span<const int32_t> Module() const {
    return std::span(tokens_).first(kModuleTokens);
  }
  std::span<const int32_t> Fresh() const {
    return std::span(tokens_).subspan(kModuleTokens, kFreshTokens);
  }

  static absl::StatusOr<RowGroup> Encode(std::span<const int32_t> tokens,
                                         PrivateSpan& span) {
    PC_ASSIGN_OR_RETURN(RowGroup group,
                        span.Append(tokens, {}, LogitsWanted::kNone));
    group.part = RowPart::kEncoder;
    return group;
  }

  absl::StatusOr<std::vector<float>> InOnePass() {
    PrivateSpan module(pages_, 0);
    PrivateSpan fresh(pages_, kModuleTokens);
    PrivateSpan decoder(pages_, 0);
    std::vector<RowGroup> groups(3);
    PC_ASSIGN_OR_RETURN(groups[0], Encode(Module(), module));
    PC_ASSIGN_OR_RETURN(groups[1], Encode(Fresh(), fresh));
    const KvView seen[] = {groups[0].own, groups[1].own};
    PC_ASSIGN_OR_RETURN(groups[2],
                        decoder.Append(decoder_ids_, seen, LogitsWanted::kAll));
    std::vector<float> logits;
    PC_RETURN_IF_ERROR(backend_.Forward(groups, &logits));
    return logits;
  }

  absl::StatusOr<std::vector<float>> Decode(std::span<const KvView> seen) {
    PrivateSpan decoder(pages_, 0);
    std::vector<float> logits;
    PC_RETURN_IF_ERROR(
        decoder.Run(backend_, decoder_ids_, seen, LogitsWanted::kAll, &logits));
    return logits;
  }

  Backend& backend_;
  PrivatePages& pages_;
  const std::vector<int32_t> tokens_;
  std::vector<int32_t> decoder_ids_;
  std::vector<float> ignored_;
};

class ReuseCheck {
 public:
  ReuseCheck(Backend& backend, PrivatePages& pages)
      : backend_(backend), pages_(pages) {
    const uint32_t context = backend.context_length();
    num_module_ = std::min(kModuleTokens, context / 4);
    num_fresh_ = std::min(kFreshTokens, context / 4);
    offset_ = std::min(kOffset, static_cast<int32_t>(context / 2));
    tokens_ = BuiltInTokens(num_module_ + num_fresh_, backend.vocab_size());
  }

  absl::StatusOr<ReuseErrors> Run(ReuseRule rule) {
    const bool fast = backend_.numerics().starts_with("fast/");
    ReuseErrors errors = {.tolerance = fast ? kFastTolerance : kTolerance};
    PrivateSpan module(pages_, 0);
    PC_RETURN_IF_ERROR(module.Run(backend_, ModuleTokens(), {},
                                  LogitsWanted::kNone, &ignored_));
    PC_ASSIGN_OR_RETURN(const std::vector<float> whole, WholeSequence());
    PC_ASSIGN_OR_RETURN(const std::vector<float> in_place,
                        FreshAfter(module.PlacedAt(0), 0));
    errors.in_place = RelativeError(in_place, whole);
    if (rule != ReuseRule::kAnywhere) return errors;

    PC_ASSIGN_OR_RETURN(const std::vector<float> moved,
                        FreshAfter(module.PlacedAt(offset_), offset_));
    PrivateSpan there(pages_, offset_);
    PC_RETURN_IF_ERROR(RunUnmoved(there));
    KvView unmoved = there.PlacedAt(0);
    unmoved.local_position = offset_;
    PC_ASSIGN_OR_RETURN(const std::vector<float> computed,
                        FreshAfter(unmoved, offset_));
    errors.moved = RelativeError(moved, computed);
    return errors;
  }

 private:
  std::span<const int32_t> ModuleTokens() const {
    return std::span(tokens_).first(num_module_);
  }

  absl::StatusOr<std::vector<float>> WholeSequence() {
    PrivateSpan span(pages_, 0);
    std::vector<float> logits;
    PC_RETURN_IF_ERROR(
        span.Run(backend_, tokens_, {}, LogitsWanted::kAll, &logits));
    logits.erase(logits.begin(),
                 logits.end() - static_cast<ptrdiff_t>(size_t{num_fresh_} *
                                                       backend_.vocab_size()));
    return logits;
  }

  // Logits of the fresh tokens after a module that begins at `start`.
  absl::StatusOr<std::vector<float>> FreshAfter(const KvView& module,
                                                int32_t start) {
    PrivateSpan span(pages_, start + static_cast<int32_t>(num_module_));
    std::vector<float> logits;
    PC_RETURN_IF_ERROR(span.Run(backend_, std::span(tokens_).last(num_fresh_),
                                {&module, 1}, LogitsWanted::kAll, &logits));
    return logits;
  }

  // The module where it is to stand, its keys rotated to those positions.
  absl::Status RunUnmoved(PrivateSpan& span) {
    PC_ASSIGN_OR_RETURN(RowGroup group,
                        span.Append(ModuleTokens(), {}, LogitsWanted::kNone));
    group.own.position_offset = 0;
    group.own.local_position = offset_;
    return backend_.Forward({&group, 1}, &ignored_);
  }

  Backend& backend_;
  PrivatePages& pages_;
  uint32_t num_module_ = 0;
  uint32_t num_fresh_ = 0;
  int32_t offset_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<float> ignored_;
};

}  // namespace

bool ReuseErrors::ok() const {
  return in_place <= tolerance && moved <= tolerance;
}

std::string ReuseErrors::ToString() const {
  return absl::StrCat("logits from reused states differ by ", in_place,
                      " of their size in place, by ", moved, " moved; at most ",
                      tolerance, " is fine");
}

absl::StatusOr<ReuseErrors> CheckReuse(Backend& backend, PrivatePages& pages,
                                       ReuseRule rule) {
  const uint32_t context = backend.context_length();
  if (context < 16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a context of ", context, " tokens is too short for the self-check"));
  }
  if (backend.decoder_start().has_value()) {
    return EncoderDecoderCheck(backend, pages).Run();
  }
  return ReuseCheck(backend, pages).Run(rule);
}

}  // namespace promptcache::worker
