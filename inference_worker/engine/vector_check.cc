#include "inference_worker/engine/vector_check.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/engine/private_span.h"
#include "inference_worker/engine/sampler.h"
#include "inference_worker/engine/vector_file.h"

namespace promptcache::worker {
namespace {

// Rows a pass: bounds the memory that their logits take.
constexpr size_t kChunkRows = 64;

double LogSumExp(std::span<const float> logits) {
  const double best = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - best);
  return best + std::log(sum);
}

double RmsError(std::span<const float> values,
                std::span<const double> expected) {
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double error = values[i] - expected[i];
    squares += error * error;
  }
  return std::sqrt(squares / static_cast<double>(values.size()));
}

class CaseCheck {
 public:
  CaseCheck(const VectorCase& expected, Backend& backend, PrivatePages& pages,
            const LogitLimits& limits, LogitErrors& errors)
      : case_(expected),
        backend_(backend),
        pages_(pages),
        limits_(limits),
        errors_(errors) {}

  // The first difference, or "".
  absl::StatusOr<std::string> Run() {
    if (!ModelFits() || !IdsAreInVocabulary()) return difference_;
    if (!case_.decoder_ids.empty()) return RunEncoderDecoder();
    PC_RETURN_IF_ERROR(EncodeSegments());
    spans_.reserve(segments_.size() + case_.plan.size());
    std::vector<KvView> seen;
    for (const VectorItem& item : case_.plan) {
      if (item.segment.has_value()) {
        seen.push_back(segments_[*item.segment].PlacedAt(item.start));
        continue;
      }
      PrivateSpan& span = spans_.emplace_back(pages_, item.start);
      PC_RETURN_IF_ERROR(RunFresh(item.fresh, span, seen));
      if (&item != &case_.plan.back()) {
        seen.push_back(span.PlacedAt(item.start));
      }
    }
    CompareMeanNll();
    CompareTop();
    CompareLast();
    PC_RETURN_IF_ERROR(Continue(spans_.back(), seen));
    return difference_;
  }

 private:
  absl::StatusOr<std::string> RunEncoderDecoder() {
    segments_.reserve(case_.segments.size());
    for (const VectorSegment& segment : case_.segments) {
      PrivateSpan& span = segments_.emplace_back(pages_, segment.encode_start);
      PC_RETURN_IF_ERROR(EncodeAlone(segment.ids, span));
    }
    spans_.reserve(case_.plan.size());
    std::vector<KvView> seen;
    for (const VectorItem& item : case_.plan) {
      if (!item.segment.has_value()) {
        PrivateSpan& span = spans_.emplace_back(pages_, item.start);
        PC_RETURN_IF_ERROR(EncodeAlone(item.fresh, span));
      }
      const PrivateSpan& span =
          item.segment.has_value() ? segments_[*item.segment] : spans_.back();
      seen.push_back(span.PlacedAt(item.start));
    }
    PrivateSpan decoder(pages_, 0);
    PC_RETURN_IF_ERROR(RunFresh(case_.decoder_ids, decoder, seen));
    CompareLast();
    PC_RETURN_IF_ERROR(CompareEncoder());
    if (case_.greedy_ids.empty()) return difference_;
    PrivateSpan greedy(pages_, 0);
    PC_RETURN_IF_ERROR(greedy.Run(backend_, {case_.decoder_ids.data(), 1}, seen,
                                  LogitsWanted::kLast, &logits_));
    PC_RETURN_IF_ERROR(Continue(greedy, seen));
    return difference_;
  }

  absl::Status EncodeAlone(std::span<const int32_t> ids, PrivateSpan& span) {
    PC_ASSIGN_OR_RETURN(RowGroup group,
                        span.Append(ids, {}, LogitsWanted::kNone));
    group.part = RowPart::kEncoder;
    return backend_.Forward({&group, 1}, &logits_);
  }

  absl::Status CompareEncoder() {
    if (case_.encoder_last.empty()) return absl::OkStatus();
    std::vector<float> output;
    PC_RETURN_IF_ERROR(
        backend_.EncoderOutput(case_.plan.back().fresh, &output));
    if (output.size() != case_.encoder_last.size()) {
      Differ(absl::StrCat("the encoder's output has ", output.size(),
                          " elements, expected ", case_.encoder_last.size()));
      return absl::OkStatus();
    }
    const double rms = RmsError(output, case_.encoder_last);
    errors_.max_encoder_rms = std::max(errors_.max_encoder_rms, rms);
    if (rms <= limits_.last_rms) return absl::OkStatus();
    Differ(absl::StrCat("the encoder's last output differs by ", rms,
                        " (root mean square)"));
    return absl::OkStatus();
  }

  bool ModelFits() {
    const bool has_encoder = backend_.decoder_start().has_value();
    if (has_encoder == !case_.decoder_ids.empty()) return true;
    Differ(has_encoder ? "the model has an encoder, the case no decoder_ids"
                       : "the model has no encoder");
    return false;
  }

  bool IdsAreInVocabulary() {
    const auto check = [this](std::span<const int32_t> ids) {
      for (const int32_t id : ids) {
        if (id >= 0 && static_cast<uint32_t>(id) < backend_.vocab_size()) {
          continue;
        }
        Differ(absl::StrCat("the vocabulary has no token ", id));
      }
    };
    for (const VectorSegment& segment : case_.segments) check(segment.ids);
    for (const VectorItem& item : case_.plan) check(item.fresh);
    check(case_.decoder_ids);
    check(case_.top_ids);
    check(case_.greedy_ids);
    if (!case_.last_logits.empty() &&
        case_.last_logits.size() != backend_.vocab_size()) {
      Differ(absl::StrCat("the vocabulary has ", backend_.vocab_size(),
                          " tokens, expected ", case_.last_logits.size()));
    }
    return difference_.empty();
  }

  absl::Status EncodeSegments() {
    segments_.reserve(case_.segments.size());
    for (const VectorSegment& segment : case_.segments) {
      std::vector<KvView> context;
      for (const size_t c : segment.context) {
        context.push_back(
            segments_[c].PlacedAt(case_.segments[c].encode_start));
      }
      segments_.emplace_back(pages_, segment.encode_start);
      PC_RETURN_IF_ERROR(segments_.back().Run(backend_, segment.ids, context,
                                              LogitsWanted::kNone, &logits_));
    }
    return absl::OkStatus();
  }

  absl::Status RunFresh(std::span<const int32_t> ids, PrivateSpan& span,
                        std::span<const KvView> seen) {
    for (size_t first = 0; first < ids.size(); first += kChunkRows) {
      const auto chunk =
          ids.subspan(first, std::min(kChunkRows, ids.size() - first));
      PC_RETURN_IF_ERROR(
          span.Run(backend_, chunk, seen, LogitsWanted::kAll, &logits_));
      for (size_t row = 0; row < chunk.size(); ++row) {
        const size_t next = first + row + 1;
        CompareFresh(Row(row), next < ids.size() ? ids[next] : -1);
      }
    }
    return absl::OkStatus();
  }

  std::span<const float> Row(size_t row) const {
    const size_t vocab = backend_.vocab_size();
    return std::span(logits_).subspan(row * vocab, vocab);
  }

  // The fresh token at index_; `next` is the one after it, if any.
  void CompareFresh(std::span<const float> logits, int32_t next) {
    const size_t i = index_++;
    CompareChoice(absl::StrCat("argmax after token ", i), Argmax(logits),
                  case_.argmax[i], case_.margin[i]);
    const bool compare_sum = i < case_.logsumexp.size();
    if (!compare_sum && i >= case_.nll.size()) return;
    const double sum = LogSumExp(logits);
    if (compare_sum) {
      CompareSum(absl::StrCat("log-sum-exp after token ", i), sum,
                 case_.logsumexp[i]);
    }
    if (i < case_.nll.size()) {
      const double nll = sum - logits[static_cast<size_t>(next)];
      errors_.max_nll = std::max(errors_.max_nll, std::abs(nll - case_.nll[i]));
      nll_sum_ += nll;
    }
  }

  void CompareMeanNll() {
    if (case_.nll.empty()) return;
    const auto count = static_cast<double>(case_.nll.size());
    const double expected =
        std::accumulate(case_.nll.begin(), case_.nll.end(), 0.0) / count;
    const double error = std::abs(nll_sum_ / count - expected);
    errors_.max_mean_nll = std::max(errors_.max_mean_nll, error);
    if (!(error <= limits_.mean_nll)) {
      Differ(absl::StrCat("mean nll is ", nll_sum_ / count, ", expected ",
                          expected));
    }
  }

  std::span<const float> LastRow() const {
    return std::span(logits_).last(backend_.vocab_size());
  }

  void CompareTop() {
    const std::span<const float> last = LastRow();
    for (size_t i = 0; i < case_.top_ids.size(); ++i) {
      const int32_t id = case_.top_ids[i];
      CompareLogit(absl::StrCat("logit of ", id, " after the last token"),
                   last[static_cast<size_t>(id)], case_.top_logits[i]);
    }
    CompareSum("log-sum-exp after the last token", LogSumExp(last),
               case_.last_logsumexp);
  }

  void CompareLast() {
    if (case_.last_logits.empty()) return;
    const std::span<const float> last = LastRow();
    for (size_t i = 0; i < last.size(); ++i) {
      errors_.max_logit =
          std::max(errors_.max_logit, std::abs(last[i] - case_.last_logits[i]));
    }
    const double rms = RmsError(last, case_.last_logits);
    errors_.max_last_rms = std::max(errors_.max_last_rms, rms);
    if (rms <= limits_.last_rms) return;
    Differ(absl::StrCat("the last token's logits differ by ", rms,
                        " (root mean square)"));
  }

  // Greedy decoding after what `span` holds: every choice after the tokens that
  // are expected before it.
  absl::Status Continue(PrivateSpan& span, std::span<const KvView> seen) {
    int32_t chosen = Argmax(Row(logits_.size() / backend_.vocab_size() - 1));
    for (size_t i = 0; i < case_.greedy_ids.size(); ++i) {
      CompareChoice(absl::StrCat("greedy token ", i), chosen,
                    case_.greedy_ids[i], case_.greedy_margins[i]);
      if (i + 1 == case_.greedy_ids.size()) break;
      PC_RETURN_IF_ERROR(span.Run(backend_, {&case_.greedy_ids[i], 1}, seen,
                                  LogitsWanted::kLast, &logits_));
      chosen = Argmax(Row(0));
    }
    return absl::OkStatus();
  }

  void CompareChoice(const std::string& what, int32_t chosen, int32_t expected,
                     double margin) {
    ++errors_.num_choices;
    if (chosen == expected) return;
    ++errors_.num_other_choices;
    errors_.max_margin_of_other = std::max(errors_.max_margin_of_other, margin);
    if (margin <= limits_.margin) return;
    Differ(absl::StrCat(what, " is ", chosen, ", expected ", expected,
                        " with a margin of ", margin));
  }

  void CompareSum(const std::string& what, double value, double expected) {
    const double error = std::abs(value - expected);
    errors_.max_logsumexp = std::max(errors_.max_logsumexp, error);
    if (error <= limits_.logsumexp) return;
    Differ(absl::StrCat(what, " is ", value, ", expected ", expected));
  }

  void CompareLogit(const std::string& what, double value, double expected) {
    const double error = std::abs(value - expected);
    errors_.max_logit = std::max(errors_.max_logit, error);
    // Written so that NaN differs.
    if (error <= limits_.logit) return;
    Differ(absl::StrCat(what, " is ", value, ", expected ", expected));
  }

  void Differ(std::string what) {
    if (difference_.empty()) difference_ = std::move(what);
  }

  const VectorCase& case_;
  Backend& backend_;
  PrivatePages& pages_;
  const LogitLimits& limits_;
  LogitErrors& errors_;
  std::vector<PrivateSpan> segments_;
  std::vector<PrivateSpan> spans_;  // of fresh items
  std::vector<float> logits_;
  size_t index_ = 0;
  double nll_sum_ = 0;
  std::string difference_;
};

LogitLimits LimitsOf(const VectorCase& c) {
  if (!c.decoder_ids.empty()) return LogitLimits::TinyEncoderDecoder();
  if (c.last_logits.empty()) return LogitLimits::Published();
  return LogitLimits::TinyModel(!c.segments.empty());
}

}  // namespace

absl::StatusOr<std::vector<CaseResult>> CheckLogitVectors(
    std::string_view json_text, Backend& backend, PrivatePages& pages,
    LogitErrors* errors) {
  PC_ASSIGN_OR_RETURN(const std::vector<VectorCase> cases,
                      ParseVectorFile(json_text));
  LogitErrors unused;
  std::vector<CaseResult> results;
  for (const VectorCase& c : cases) {
    const LogitLimits limits = LimitsOf(c);
    PC_ASSIGN_OR_RETURN(
        std::string difference,
        CaseCheck(c, backend, pages, limits, errors ? *errors : unused).Run());
    results.push_back({c.name, std::move(difference)});
  }
  return results;
}

}  // namespace promptcache::worker
