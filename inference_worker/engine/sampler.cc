#include "inference_worker/engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace promptcache::worker {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

float Usable(float logit) { return std::isnan(logit) ? kNever : logit; }

using Candidate = std::pair<float, int32_t>;  // logit, later weight; id

// A total order: best first, lower id first among equals.
bool Better(const Candidate& a, const Candidate& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// Logits as they are chosen from: lowered where `penalized` (ascending) says.
class PenalizedLogits {
 public:
  PenalizedLogits(std::span<const float> logits,
                  std::span<const int32_t> penalized, float penalty)
      : logits_(logits), penalized_(penalized), penalty_(penalty) {}

  size_t size() const { return logits_.size(); }
  // Calls visit(logit, id) for each token, in order of ids.
  template <typename Visit>
  void ForEach(Visit visit) const {
    size_t i = 0;
    for (const int32_t id : penalized_) {
      if (id < 0) continue;
      const auto at = static_cast<size_t>(id);
      if (at >= size()) break;
      for (; i < at; ++i) visit(Usable(logits_[i]), static_cast<int32_t>(i));
      const float logit = Usable(logits_[i++]);
      visit(logit > 0 ? logit / penalty_ : logit * penalty_, id);
    }
    for (; i < size(); ++i) visit(Usable(logits_[i]), static_cast<int32_t>(i));
  }
  // The lowest id of a tie.
  Candidate Best() const {
    Candidate best = {kNever, 0};
    ForEach([&best](float logit, int32_t id) {
      if (logit > best.first) best = {logit, id};
    });
    return best;
  }

 private:
  const std::span<const float> logits_;
  const std::span<const int32_t> penalized_;
  const float penalty_;
};

// What a token is drawn from, with filters to be applied in this order.
class Candidates {
 public:
  explicit Candidates(const PenalizedLogits& logits) {
    all_.reserve(logits.size());
    logits.ForEach(
        [this](float logit, int32_t id) { all_.emplace_back(logit, id); });
  }

  void KeepTopK(size_t k);
  // Turns logits into weights relative to the best one.
  void Exponentiate(float best, float temperature);
  void KeepTopP(float top_p);
  void KeepMinP(float min_p);
  int32_t Draw(double uniform);

 private:
  std::vector<Candidate> all_;
};

void Candidates::KeepTopK(size_t k) {
  if (k == 0 || k >= all_.size()) return;
  const auto end = all_.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(all_.begin(), end, all_.end(), Better);
  all_.erase(end, all_.end());
}

void Candidates::Exponentiate(float best, float temperature) {
  for (Candidate& c : all_) {
    c.first = std::exp((c.first - best) / temperature);
  }
}

void Candidates::KeepTopP(float top_p) {
  if (top_p >= 1) return;
  double total = 0;
  for (const Candidate& c : all_) total += c.first;
  const double enough = total * top_p;
  // A heap, not a sort: few candidates hold most of the weight.
  const auto worse = [](const Candidate& a, const Candidate& b) {
    return Better(b, a);
  };
  std::ranges::make_heap(all_, worse);
  auto end = all_.end();
  for (double kept = 0; kept < enough && end != all_.begin();) {
    std::pop_heap(all_.begin(), end, worse);
    --end;
    kept += end->first;
  }
  all_.erase(all_.begin(), end);
}

void Candidates::KeepMinP(float min_p) {
  if (min_p <= 0) return;
  float best = 0;
  for (const Candidate& c : all_) best = std::max(best, c.first);
  std::erase_if(all_,
                [&](const Candidate& c) { return c.first < best * min_p; });
}

int32_t Candidates::Draw(double uniform) {
  // By id, so that the filters' order of work does not show.
  if (!std::ranges::is_sorted(all_, {}, &Candidate::second)) {
    std::ranges::sort(all_, {}, &Candidate::second);
  }
  double total = 0;
  for (const Candidate& c : all_) total += c.first;
  double left = uniform * total;
  int32_t chosen = all_.front().second;
  for (const Candidate& c : all_) {
    if (c.first <= 0) continue;
    chosen = c.second;
    left -= c.first;
    if (left < 0) break;
  }
  return chosen;
}

// The finaliser of SplitMix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

absl::Status OutOfRange(const char* field, float value, const char* range) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", must be ", range));
}

}  // namespace

double UniformDraw(uint64_t seed, uint64_t step) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const uint64_t bits = Mix(Mix(seed + kGolden) + (step + 1) * kGolden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

absl::Status SamplingOptions::Validate() const {
  // Written so that NaN fails.
  if (!(temperature >= 0 && temperature <= 100)) {
    return OutOfRange("temperature", temperature, "in [0, 100]");
  }
  if (!(top_p > 0 && top_p <= 1)) {
    return OutOfRange("top_p", top_p, "in (0, 1]");
  }
  if (!(min_p >= 0 && min_p <= 1)) {
    return OutOfRange("min_p", min_p, "in [0, 1]");
  }
  if (!(repetition_penalty > 0 && repetition_penalty <= 100)) {
    return OutOfRange("repetition_penalty", repetition_penalty,
                      "above 0 and at most 100");
  }
  return absl::OkStatus();
}

int32_t Sampler::Sample(std::span<const float> logits,
                        std::span<const int32_t> history) {
  const int32_t token = Choose(logits, NextChoice(history));
  CountStep();
  return token;
}

TokenChoice Sampler::NextChoice(std::span<const int32_t> history) {
  penalized_.clear();
  if (options_.repetition_penalty != 1) {
    const size_t window =
        std::min<size_t>(options_.repetition_window, history.size());
    const std::span<const int32_t> recent = history.last(window);
    penalized_.assign(recent.begin(), recent.end());
    std::ranges::sort(penalized_);
    const auto repeated = std::ranges::unique(penalized_);
    penalized_.erase(repeated.begin(), repeated.end());
  }
  return {.options = options_,
          .penalized = penalized_,
          .uniform = UniformDraw(options_.seed, step_)};
}

int32_t Sampler::Choose(std::span<const float> logits,
                        const TokenChoice& choice) const {
  const PenalizedLogits usable(logits, choice.penalized,
                               options_.repetition_penalty);
  const auto [best, id] = usable.Best();
  // With an infinite best there is nothing left to weigh.
  if (options_.temperature == 0 || std::isinf(best)) return id;
  Candidates candidates(usable);
  candidates.KeepTopK(options_.top_k);
  candidates.Exponentiate(best, options_.temperature);
  candidates.KeepTopP(options_.top_p);
  candidates.KeepMinP(options_.min_p);
  return candidates.Draw(choice.uniform);
}

std::vector<std::pair<int32_t, float>> TopLogprobs(
    std::span<const float> logits, uint32_t count) {
  const size_t n = std::min<size_t>(count, logits.size());
  std::vector<std::pair<float, int32_t>> order(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    order[i] = {Usable(logits[i]), static_cast<int32_t>(i)};
  }
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(n);
  std::partial_sort(order.begin(), end, order.end(), Better);
  std::vector<std::pair<int32_t, float>> top;
  if (n == 0) return top;
  const double best = order[0].first;
  double total = 0;
  if (std::isfinite(best)) {
    for (const auto& [logit, id] : order) total += std::exp(logit - best);
  }
  for (size_t i = 0; i < n; ++i) {
    const double logprob = std::isfinite(best)
                               ? order[i].first - best - std::log(total)
                               : static_cast<double>(kNever);
    top.emplace_back(order[i].second, static_cast<float>(logprob));
  }
  return top;
}

int32_t Argmax(std::span<const float> logits) {
  size_t best = 0;
  float best_logit = kNever;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > best_logit) {
      best = i;
      best_logit = logits[i];
    }
  }
  return static_cast<int32_t>(best);
}

float Margin(std::span<const float> logits) {
  float best = kNever;
  float second = kNever;
  for (const float raw : logits) {
    const float logit = Usable(raw);
    second = std::max(second, std::min(best, logit));
    best = std::max(best, logit);
  }
  return best == second ? 0 : best - second;
}

}  // namespace promptcache::worker
