#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "promptcache/v1/inference.pb.h"
#include "tools/cli/client.h"

namespace promptcache::cli {

// One way of answering a prompt.
struct DemoMode {
  std::string name;  // for people
  std::string key;   // for JSON
  v1::CacheMode cache_mode = v1::CACHE_MODE_READ_WRITE;
  v1::AttentionMode attention = v1::ATTENTION_MODE_PLAN;
};

struct DemoAnswer {
  DemoMode mode;
  std::string text;
  double ttft_ms = 0;  // as the client saw it: request sent, first token here
  v1::Completed completed;
};

struct DemoPrompt {
  std::string name;  // "documents in the schema's order"
  std::string key;   // "exact"
  std::string pml;
  std::string question;
  std::vector<DemoAnswer> answers;  // full, bypass, first, cached
  std::vector<double> full_ms;      // time to first token, one a repeat
  std::vector<double> cached_ms;
  // The fewest that any of the runs over the cache read from it.
  uint32_t least_cached_tokens = 0;

  const DemoAnswer& full() const { return answers[0]; }
  const DemoAnswer& bypass() const { return answers[1]; }
  const DemoAnswer& first() const { return answers[2]; }
  const DemoAnswer& cached() const { return answers[3]; }
  bool answers_agree() const { return cached().text == bypass().text; }
  double ttft_full_ms() const;  // medians
  double ttft_cached_ms() const;
};

double Median(std::vector<double> values);

// The four modes, in order.
std::vector<DemoMode> DemoModes();

// Answers once. `on_text` gets the answer as it comes.
absl::StatusOr<DemoAnswer> RunAnswer(
    WorkerClient* worker, const std::string& pml, const DemoMode& mode,
    uint32_t max_tokens,
    const std::function<void(const std::string&)>& on_text);

// Times to the first token of full attention and of cached modules, in turns,
// so that a busy moment of the machine meets both. The answers' own are the
// first of `repeats`.
absl::Status MeasureRepeats(WorkerClient* worker, uint32_t repeats,
                            const std::function<void(uint32_t)>& on_repeat,
                            DemoPrompt* prompt);

}  // namespace promptcache::cli
